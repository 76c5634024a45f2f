/* A standby that keeps trying acquires eventually, once the holder's heartbeats have stopped: because it was killed, or
 * because only its keeper hangs while its transactions continue, overlapping, as fast as they can. */
#include "lease.pml"

bool stopped, killed, taken;

ltl takeover { [] (stopped -> <> taken) }

proctype user(byte s) {
    SESSION_VARIABLES;
    {
        number = 17;
end:    do
        :: transaction(s, 0, 0)
        od
    } unless { d_step { killed -> end_transaction(s) } }   /* the server notices that the client has gone */
}

proctype keeper() {
    SESSION_VARIABLES;
    {
        do
        :: true -> beat_renew(KEEPER(0), 0)
        :: stopped = true; break
        :: atomic { stopped = true; killed = true }; break
        od
    } unless { d_step { killed -> end_transaction(KEEPER(0)) } }
}

proctype standby(byte me) {
    SESSION_VARIABLES;
end:
    do
    :: true -> lease_acquire(me, 0, me);
        if
        :: status == acquired -> taken = true; break
        :: else
        fi
    od
}

init {
    atomic {
        sequence = 1; beat[0].row = true; beat[0].left = TTL;
        lease[0].row = true; lease[0].fence = 17; lease[0].newest = 17; highest[0] = 17;
        run user(0); run user(KEEPER(1)); run keeper(); run standby(1);
#ifdef LARGE
        run standby(2);
#endif
        run clock()
    }
}
