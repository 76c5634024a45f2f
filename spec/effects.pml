/* Effects are mutually exclusive in fence order, for any clock and for pauses of any process, of any length.
 *
 * Three clients, each holder or standby; their heartbeats; an operator who takes the lease away; a nemesis that ends
 * sessions (kill -9, terminated backend, idle_in_transaction_session_timeout) and fails over once. Every process may stop
 * for good between two requests, so a deadlock is an end state in which a process still waits.
 */
#define ANY_CLOCK
#if defined(KILLS) || defined(FAILOVERS)
#define NEMESIS
#endif
#include "lease.pml"

bool keeping[BEATS];        /* beats that the keepers have to renew */

#ifdef NEMESIS
#define call(s, what) { what } unless { atomic { broken[s] -> broken[s] = false; hang_up() } }
#else
#define call(s, what) what
#endif

inline hang_up() {
    status = unknown;
    r_row = false; r_dead = false; r_expired = false; r_beat = 0; r_token = 0; r_fence = 0; attempt = 0; declared = 0;
    savepoint = false
}

/* `granted`: the fence of a lease that the client already holds, or 0. */
proctype client(byte me; byte granted) {
    SESSION_VARIABLES;
    byte turn, id, writes;
    do
    :: turn < TURNS ->
        id = me + CLIENTS * turn;
        if
        :: granted -> number = granted; granted = 0; status = acquired
        :: else ->
            do
            :: true -> call(me, lease_acquire(me, 0, id));
                if
                :: status == acquired -> break
                :: status == acquired -> status = 0                 /* the reply was lost: repeat the request */
                :: status == beat_lost -> break
                :: else -> status = 0
                fi
            :: break                                                /* gives up */
            od
        fi;
        if
        :: status == acquired ->
            keeping[id] = true;
            do
            :: writes < WRITES -> writes++; call(me, transaction(me, 0, id)); status = 0
            :: break
            od;
            atomic { keeping[id] = false; writes = 0 };
            if
#ifndef NO_RELEASE
            :: true -> call(me, lease_release(me, 0, id, false))
#endif
            :: skip                                                 /* the lease expires instead */
            fi
        :: else
        fi;
        atomic { number = 0; remaining = 0; status = 0; id = 0; step = 0; turn++ }
    :: break
    od
}

proctype keeper(byte me) {
    SESSION_VARIABLES;
end:
    do
    :: keeping[me] -> call(KEEPER(me), beat_renew(KEEPER(me), me)); status = 0
    od
}

#ifdef FORCED
proctype operator() {
    SESSION_VARIABLES;
    byte times;
    do
    :: times < FORCED -> times++; call(OPERATOR, lease_force_release(OPERATOR, 0))
    :: break
    od
}
#endif

#ifdef FAILOVERS
/* The state of the standby when the primary died. The last commits may be missing, those of the sequence too. */
Beat replica_beat[BEATS];
Lease replica_lease[NAMES];
byte replica_sequence;
#endif

#ifdef NEMESIS
proctype nemesis() {
    byte i, kills;
    do
#ifdef KILLS
    /* kill -9, pg_terminate_backend, idle_in_transaction_session_timeout: the server rolls open transactions back */
    :: d_step { kills < KILLS && calling[0] -> kills++; end_transaction(0); broken[0] = true }
    :: d_step { kills < KILLS && calling[1] -> kills++; end_transaction(1); broken[1] = true }
    :: d_step { kills < KILLS && calling[KEEPER(0)] -> kills++; end_transaction(KEEPER(0)); broken[KEEPER(0)] = true }
#endif
#ifdef FAILOVERS
    :: life == 1 ->
        d_step {        /* the last state that reached the standby */
            for (i : 0 .. BEATS - 1) {
                replica_beat[i].row = beat[i].row; replica_beat[i].dead = beat[i].dead
            }
            for (i : 0 .. NAMES - 1) {
                replica_lease[i].row = lease[i].row; replica_lease[i].beat = lease[i].beat;
                replica_lease[i].token = lease[i].token; replica_lease[i].fence = lease[i].fence;
                replica_lease[i].newest = lease[i].newest
            }
            replica_sequence = sequence; i = 0
        };
        d_step {        /* promotion: a new life; sessions and locks are lost */
            life++;
            for (i : 0 .. BEATS - 1) {
                beat[i].row = replica_beat[i].row; beat[i].dead = replica_beat[i].dead; beat[i].lock = UNLOCKED;
                replica_beat[i].row = false; replica_beat[i].dead = false
            }
            for (i : 0 .. NAMES - 1) {
                lease[i].row = replica_lease[i].row; lease[i].beat = replica_lease[i].beat;
                lease[i].token = replica_lease[i].token; lease[i].fence = replica_lease[i].fence;
                lease[i].newest = replica_lease[i].newest;
                lease[i].lock = UNLOCKED; lease[i].share = 0; lease[i].take = UNLOCKED;
                replica_lease[i].row = false; replica_lease[i].beat = 0; replica_lease[i].token = 0;
                replica_lease[i].fence = 0; replica_lease[i].newest = 0
            }
            sequence = replica_sequence; replica_sequence = 0;
            for (i : 0 .. SESSIONS - 1) { broken[i] = calling[i]; calling[i] = false }
            i = 0
        }
#endif
    :: break
    od
}
#endif

init {
    byte i, number;
    atomic {
#ifdef GRANTED
        next_fence();
        lease[0].row = true; lease[0].fence = number; lease[0].newest = number; highest[0] = number;
        beat[0].row = true; beat[0].left = TTL;
        run client(0, number);
#else
        run client(0, 0);
#endif
        for (i : 1 .. CLIENTS - 1) { run client(i, 0) }
        for (i : 0 .. KEEPERS - 1) { run keeper(i) }
#ifdef FORCED
        run operator();
#endif
#ifdef NEMESIS
        run nemesis();
#endif
        i = 0; number = 0
    }
}
