/* At most one client believes that it holds the lease, if all clocks run at one rate and no operator uses force.
 *
 * A client counts its trust from before it sent the request. A lost reply, of an acquire or of a heartbeat, never extends
 * it, and trust that has ended does not come back (after() in lease/trust.py). With BY_FORCE an operator uses force: then
 * two clients may believe, but only until the loser has the reply to its next heartbeat. */
#include "lease.pml"

/* The reply has arrived: believe for the time that is left. */
inline believe(who, s) {
    trust[who] = counted(s, remaining);
    asked[s] = 0; remaining = 0;
    if
    :: trust[who] > 0 ->
        believers = 0;
        for (i : 0 .. CLIENTS - 1) {
            if :: trust[i] > 0 -> believers++ :: else fi
        }
#ifndef BY_FORCE
        assert(believers == 1);                         /* at most one believer */
#endif
        believers = 0
    :: else
    fi;
    i = 0
}

proctype client(byte me) {
    SESSION_VARIABLES;
    byte believers;
    do
    :: true -> lease_acquire(me, 0, me);
        if
        :: status == acquired -> d_step { believe(me, me) }; break
        :: asked[me] = 0; status = 0                    /* refused, or the reply was lost: retry */
        fi
    :: break
    od;
    if
    :: status == acquired && trust[me] > 0 -> run keeper(me)
    :: else
    fi;
    if
    :: status == acquired -> trust[me] = 0; lease_release(me, 0, me, false)
    :: true                                             /* continues, or hangs, until the keeper reports the loss */
    fi
}

proctype keeper(byte me) {
    SESSION_VARIABLES;
    byte believers;
    do
    :: trust[me] > 0 ->
        beat_renew(KEEPER(me), me);
#ifdef BY_FORCE
        assert(status != renewed || trust[me] == 0 || r_row || number != 0);    /* the generation reveals force */
        /* _check_leases: select token from lease where beat = … */
        atomic {
            if :: status == renewed && number != 0 && !(lease[0].row && lease[0].beat == me) -> status = lost :: else fi;
            number = 0; r_row = false
        };
#endif
        if
        :: d_step { status == renewed && trust[me] > 0 -> remaining = TTL; believe(me, KEEPER(me)) }
        :: d_step { status == renewed && trust[me] == 0 -> asked[KEEPER(me)] = 0; status = 0 }    /* too late: stays lost */
        :: d_step { status == lost -> trust[me] = 0; asked[KEEPER(me)] = 0; status = 0 }
        :: d_step { asked[KEEPER(me)] = 0; status = 0 }                                         /* unknown */
        fi
    :: trust[me] == 0 -> break
    od
}

#ifdef BY_FORCE
proctype operator() {
    SESSION_VARIABLES;
    lease_force_release(OPERATOR, 0)
}
#endif

init {
    byte i;
    atomic {
        for (i : 0 .. CLIENTS - 1) { run client(i) }
#ifdef BY_FORCE
        run operator();
#endif
        run clock();
        i = 0
    }
}
