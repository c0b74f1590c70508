/* Memory in whole lines of the cache. */
#pragma once

#include <stdlib.h>

#include "simd.h"

static void *alloc_aligned(int64_t size) { return aligned_alloc(64, (size_t)round_up(max_int(size, 64), 64)); }
