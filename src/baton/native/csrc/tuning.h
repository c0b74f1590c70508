/* Thresholds that were found by measuring, on 2 cores of a virtual Xeon with AMX (docs/internals/notes/kernel-steps.md);
 * SMMLA_FROM has not been timed. None of them changes a bit of any result. With each: what finds it again.
 */
#pragma once

/* ---- Products (bench/kernel_times.py) ---- */

#define ROWS_PER_CHUNK 256              /* of a chunk: enough to make use of a panel that was fetched */
#define UNPACK_FROM 12                  /* rows for which it pays to turn the nibbles of a panel into bytes first */
#define SMMLA_FROM 8                    /* rows for which it pays to put a panel in order for smmla first */
#define Q4_AMX_FROM 4                   /* rows that are faster on tiles */
#define INT8_AMX_FROM 2                 /* rows that are faster on tiles */
#define FETCHED_AHEAD 18432             /* bytes, for one row: about a panel. The processor itself sees no more than a page ahead */
#define TILES_AHEAD 6144                /* the same on tiles: the first rows fetch it for all */
#define ALONE_ROWS 16                   /* up to this many, every member prepares the rows for itself: cheaper than waiting for others */
#define EXPERT_ROWS 64                  /* of an expert that are multiplied at once: their bytes stay in the second cache */
#define CHUNKS_PER_MEMBER 8             /* that few units of experts are cut into, so that all members end at about the same time */
#define PREPARED_ROWS 16                /* of a chunk: what is kept of their groups shares lines of the cache, which two must not write to */

/* ---- Attention (bench/kernel_times.py) ---- */

#define ITEM_ROWS 48                    /* of a chunk: one key tile of keys and values stays in the first cache for all of them */
#define SPLIT_ROWS 16                   /* of an item whose splits go to several members */
#define INT8_ATTENTION_AMX_FROM 8       /* rows that are faster on tiles */

/* ---- Threads (bench/cpu.py --cases neighbour) ---- */

#define LOOKS 64                        /* between two looks at the clock */
#define PHASE_NANOSECONDS 40000         /* of looking for the end of a phase; then sleep */
#define ROUND_NANOSECONDS 500000        /* of looking for the next round: a virtual core that has gone to sleep is slow to wake */
#define BURST_NANOSECONDS 1000000
#define PAUSE_LEAST 1000000             /* between bursts; with less there are no bursts */
#define PAUSE_FIRST 2000000
#define PAUSE_MOST 64000000
#define AGAIN_NANOSECONDS 50000000      /* twice within this time means a neighbour; once is chance */
#define LOST_NANOSECONDS 1000000        /* on the way through a round, if it is a third of it too: other processes of ours take less */

/* ---- Packing ---- */

#define RUN_ROWS 64                     /* taken at once */
