/* AVX2 with VNNI for a processor that has VNNI as a part of AVX-512 alone: the same dot product under its other name. Forced in front
 * of the library's source (-include). */
#pragma once

#include <immintrin.h>

#define __AVXVNNI__ 1
#define _mm256_dpbusd_avx_epi32 _mm256_dpbusd_epi32
