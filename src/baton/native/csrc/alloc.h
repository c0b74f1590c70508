/* Memory in whole lines of the cache. */
#pragma once

#include <stdlib.h>

#include "simd.h"

static void *room(int64_t bytes) { return aligned_alloc(64, (size_t)round_up(larger(bytes, 64), 64)); }
