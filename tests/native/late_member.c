/* A member that is woken late, at the worst moment: while the caller makes the phases ready for the next round.
 *
 * Round 1 has two phases, round 2 one. The member falls asleep in the second phase of round 1, where the caller has the only
 * chunk; when it wakes up the caller is held between its two stores to that phase. If the member then takes the phase for one
 * that is still going on, it sleeps again, nobody wakes it in round 2, and the team never ends.
 */

#include <stdatomic.h>
#include <unistd.h>

static void held(const volatile void *place);
#undef atomic_store_explicit
#define atomic_store_explicit(place, value, order) (__atomic_store_n(place, value, order), held(place))

#include "thread_team.h"

#include <stdio.h>

static Team *team;
static _Atomic int rounds_done;

static void held(const volatile void *place) {
    const Phase *second = &team->phases[1];
    if (atomic_load(&rounds_done) == 1 && (place == &second->before || place == &second->taken)) usleep(20000);
}

static void first(Member *me, const void *with) {
    (void)with;
    while (next_chunk(me, 2) >= 0) usleep(1000);
    barrier(me, 2);
    if (me->number == 0) {
        while (next_chunk(me, 1) >= 0) usleep(20000);  /* long enough for the other one to fall asleep */
        atomic_store(&rounds_done, 1);
    } else usleep(1000);
    barrier(me, 1);
}

static void second(Member *me, const void *with) {
    (void)with;
    while (next_chunk(me, 2) >= 0) usleep(1000);
    barrier(me, 2);
}

int main(void) {
    for (int i = 0; i < 5; i++) {
        team = team_new(2, 2);
        atomic_store(&rounds_done, 0);
        team_run(team, first, "", 1, 2);
        team_run(team, second, "", 1, 2);
        team_free(team);
    }
    puts("ended");
    return 0;
}
