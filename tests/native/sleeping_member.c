/* A member that is set aside between its last look at a phase and its sleep, until that round is over and the next one has begun.
 *
 * Round 1 has two phases; in the second the caller has the only chunk, and the member is about to sleep until it is done. It is
 * held there until the caller has begun round 2, which uses the first phase alone. If the number that the member looked at is
 * back by then, it falls asleep for good: nobody wakes it, and the team never rests.
 */

#include <stdatomic.h>
#include <sys/syscall.h>
#include <unistd.h>

static long held_syscall(long number, ...);
#define syscall held_syscall

#include "thread_team.h"

#undef syscall

#include <stdarg.h>
#include <stdio.h>

enum { WAITS_MOST = 5000 };  /* milliseconds */

static _Atomic(_Atomic uint32_t *) watched;
static _Atomic int held, rounds_begun;

static void wait_for(_Atomic int *word, int least) {
    for (int i = 0; i < WAITS_MOST && atomic_load(word) < least; i++) usleep(1000);
}

/* All calls are of futexes: word, what to do, number, time. */
static long held_syscall(long number, ...) {
    va_list list;
    va_start(list, number);
    _Atomic uint32_t *word = va_arg(list, _Atomic uint32_t *);
    int what = va_arg(list, int);
    uint32_t old = va_arg(list, uint32_t);
    void *time = va_arg(list, void *);
    va_end(list);
    if (what == FUTEX_WAIT_PRIVATE && atomic_load(&watched) == word && !atomic_exchange(&held, 1)) wait_for(&rounds_begun, 2);
    return syscall(number, word, what, old, time, NULL, 0);
}

static void first(Member *me, const void *with) {
    (void)with;
    while (next_chunk(me, 2) >= 0) usleep(1000);
    barrier(me, 2);
    if (me->number == 0)
        while (next_chunk(me, 1) >= 0) wait_for(&held, 1);
    else usleep(1000);  /* the chunk is the caller's */
    barrier(me, 1);
}

static void second(Member *me, const void *with) {
    (void)with;
    atomic_store(&rounds_begun, 2);
    while (next_chunk(me, 2) >= 0) usleep(20000);  /* long enough for the other one to fall asleep */
    barrier(me, 2);
}

int main(void) {
    Team *team = team_new(2, 2);
    atomic_store(&watched, &team->phases[1].done);
    team_run(team, first, "", 1, 2);
    team_run(team, second, "", 1, 2);
    if (!atomic_load(&held)) return puts("the member never slept"), 1;
    alarm(20);
    team_rest(team);
    team_free(team);
    puts("ended");
    return 0;
}
