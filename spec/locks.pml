/* No deadlock: a process that waits for a row lock gets it eventually, without a timeout or the deadlock detector.
 *
 * One process holds two leases on one beat; one process tries to take over each of them, an operator takes both away,
 * callers without a keeper use lease_renew, and transactions protect both. An end state in which a process waits is a
 * deadlock. */
#define ANY_CLOCK
#define NAMES 2
#include "lease.pml"

proctype thief(byte me; byte n) {
    SESSION_VARIABLES;
#ifdef ONCE
    lease_acquire(me, n, me)
#else
    do
    :: true -> lease_acquire(me, n, me)
    :: break
    od
#endif
}

proctype heartbeat() {
    SESSION_VARIABLES;
#ifdef ONCE
    beat_renew(KEEPER(0), 0)
#else
    do
    :: true -> beat_renew(KEEPER(0), 0)
    :: break
    od
#endif
}

proctype operator(byte s; byte n) {
    SESSION_VARIABLES;
    lease_force_release(s, n)
}

proctype caller() {
    SESSION_VARIABLES;
    if
    :: true -> lease_renew(KEEPER(1), 0, 0)
    :: true -> lease_renew(KEEPER(1), 1, 0)
    fi;
    if
    :: true -> lease_release(KEEPER(1), 0, 0, true)
    :: true -> lease_release(KEEPER(1), 1, 0, true)
    fi
}

proctype user() {
    SESSION_VARIABLES;
    number = 17;
    if
    :: true -> transaction(0, 0, 0)
    :: true -> transaction(0, 1, 0)
    fi
}

init {
    byte i;
    atomic {
        sequence = 1; beat[0].row = true;
        for (i : 0 .. NAMES - 1) { lease[i].row = true; lease[i].fence = 17; lease[i].newest = 17; highest[i] = 17 }
        run thief(1, 0); run thief(2, 1); run user(); run operator(OPERATOR, 0);
#ifdef LARGE
        run caller();
#else
        run heartbeat();
#endif
        i = 0
    }
}
