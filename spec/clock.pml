/* Clocks of server and clients run at one rate (the margin in lease/trust.py covers the difference), so one tick passes
 * for all. A time is stored as the ticks left until it, which keeps the number of states finite. */

byte trust[CLIENTS];        /* ticks a client may still act as the holder, by its own clock */
byte asked[SESSIONS];       /* 1 + ticks since the request was sent; 0: no request */
byte stamped[SESSIONS];     /* 1 + ticks since clock_timestamp() was read for an expires_at that is not committed yet */

#define look(b) expired = (beat[b].left == 0)
#define ask(s) asked[s] = 1
#define stamp(s) stamped[s] = 1
#define unstamp(s) stamped[s] = 0
#define ticks_left(s) (TTL + 1 - stamped[s])

/* Trust.counted(ttl, asked_at, remaining) */
#ifdef TRUST_FROM_REPLY
#define counted(s, remaining) remaining
#else
#define counted(s, remaining) (remaining + 1 > asked[s] -> remaining + 1 - asked[s] : 0)
#endif

proctype clock() {
    byte i;
end:
    do
    :: d_step {
        for (i : 0 .. BEATS - 1) {
            if :: beat[i].left > 0 -> beat[i].left-- :: else fi
        }
        for (i : 0 .. CLIENTS - 1) {
            if :: trust[i] > 0 -> trust[i]-- :: else fi
        }
        for (i : 0 .. SESSIONS - 1) {
            if :: asked[i] > 0 && asked[i] <= TTL -> asked[i]++ :: else fi;
            if :: stamped[i] > 0 && stamped[i] <= TTL -> stamped[i]++ :: else fi
        }
        i = 0
    }
    od
}
