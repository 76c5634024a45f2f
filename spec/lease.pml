/* The lease, beat and fence protocol of src/holdfast/database/migrations/postgres/0001_lease.up.sql: its rows, its row locks,
 * and its functions as inlines of the same names. The instances (effects, belief, locks, progress) include this file.
 *
 * How to read it beside the SQL:
 *   - one atomic or d_step block is one SQL statement inside a function, or its COMMIT. Between two blocks any other
 *     process may run, and any process may pause for any time: a paused holder needs no process of its own;
 *   - `step` is the next statement of a longer function;
 *   - a false guard at the head of a block is a statement that waits for a row lock; SKIP LOCKED is an `else`;
 *   - a transaction keeps its writes in its own variables, under its row locks, and copies them into the rows at COMMIT:
 *     until then other sessions see the old version, as in READ COMMITTED.
 */

#ifndef CLIENTS
#define CLIENTS 3
#endif
#ifndef NAMES
#define NAMES 1             /* leases */
#endif
#ifndef TURNS
#define TURNS 1             /* acquisitions per client; each has its own beat and token */
#endif
#ifndef ATTEMPTS
#define ATTEMPTS 2          /* the loop in lease_acquire: 4 in the SQL */
#endif
#ifndef TTL
#define TTL 2               /* ticks, in instances with a clock */
#endif

/* How a user's transaction is protected. The last three are wrong, and the search must find that out. */
#define AT_START  1         /* lease_protect: FOR SHARE on the lease row, first statement of the transaction */
#define AT_COMMIT 2         /* lease_protect_at_commit: FOR SHARE inside COMMIT, by the deferred trigger */
#define NOTHING   3         /* reads whether the lease is still held, then writes */
#define KEY_SHARE 4         /* AT_START with FOR KEY SHARE, which an UPDATE of other columns does not wait for */
#define RECHECK   5         /* reads it again just before COMMIT, without a row lock */
#ifndef PROTECT
#define PROTECT AT_START
#endif

#define BEATS (CLIENTS * TURNS)
#define SESSIONS (2 * CLIENTS + 2)      /* of the clients and their keepers, and two more */
#define KEEPER(client) (CLIENTS + client)
#define OPERATOR (2 * CLIENTS)
#define UNLOCKED 0                        /* in a lock; otherwise the session + 1 */
#define ME(session) (session + 1)

mtype = { acquired, held, busy, beat_lost, renewed, lost, unknown, fenced_out, done };
mtype = { look_up, resend, try_name, draw, insert, redraw, declare, steal, draw_again, snapshot, lock_row, write, check, commit };

typedef Beat {
    bool row;               /* a missing beat counts as dead */
    bool dead;
    byte left;              /* ticks until expires_at */
    byte generation;
    byte lock               /* FOR NO KEY UPDATE, or an UPDATE */
}

typedef Lease {
    bool row;
    byte beat;
    byte token;
    byte fence;
    byte lock;              /* FOR UPDATE, FOR NO KEY UPDATE, or an uncommitted UPDATE, DELETE or INSERT */
    byte share;             /* FOR SHARE: one bit per session */
    byte take;              /* pg_try_advisory_xact_lock('holdfast.take', name) */
    byte newest             /* the highest fence of a committed grant, as in the history table */
}

Beat beat[BEATS];
Lease lease[NAMES];
byte sequence;
byte life = 1;              /* the life of the server: each raises the sequence before its first draw */

#ifdef NEMESIS
bool calling[SESSIONS];
bool broken[SESSIONS];      /* the server ended the session during a call: rolled back, or committed without a reply */
#define begin(s) calling[s] = true
#define end(s) calling[s] = false
#else
#define begin(s) skip
#define end(s) skip
#endif

byte highest[NAMES];        /* the highest fence of any grant: not in the database, so a failover does not reset it */

#ifdef ANY_CLOCK
/* Whenever a statement reads the server's clock, it may return anything: steps ahead, steps back, long pauses. */
#define look(b) if :: expired = true :: expired = false fi
#define ask(s) skip
#define stamp(s) skip
#define ticks_left(s) TTL
#define unstamp(s) skip
#else
#include "clock.pml"
#endif

/* The local variables of a session. */
#define SESSION_VARIABLES \
    mtype status, step; byte number, r_beat, r_token, r_fence, attempt, declared, remaining, i; \
    bool r_row, r_dead, r_expired, expired, savepoint

/* Row locks. An uncommitted new row is invisible, so no session waits for it here; only a second INSERT would. */
#define written(n) (lease[n].row && lease[n].lock != UNLOCKED)
#define free_for_share(n) (!written(n))
#define free_for_update(n) (!written(n) && lease[n].share == 0)
#if PROTECT == KEY_SHARE
#define free_for_no_key_update(n) (!written(n))
#else
#define free_for_no_key_update(n) free_for_update(n)
#endif

inline end_transaction(s) {
    end(s);
    unstamp(s);
    for (i : 0 .. NAMES - 1) {
        if :: lease[i].lock == ME(s) -> lease[i].lock = UNLOCKED :: else fi;
        if :: lease[i].take == ME(s) -> lease[i].take = UNLOCKED :: else fi;
        lease[i].share = lease[i].share & ~(1 << s)
    }
    for (i : 0 .. BEATS - 1) {
        if :: beat[i].lock == ME(s) -> beat[i].lock = UNLOCKED :: else fi
    }
    i = 0
}

/* holdfast.draw: raised by the clock in each life of the server, then nextval. A rollback undoes neither. */
inline next_fence() {
    sequence++;
    assert(sequence < 16);
#ifdef FENCE_RESTARTS
    number = sequence       /* without the raise, a failover that lost the last commits issues a fence twice */
#else
    number = life * 16 + sequence
#endif
}

/* lease_acquire(name, holder, ttl, token => id): a token and a new beat, both called id. Never waits for a row lock that is
 * held for long. `continue` in the SQL is another iteration of its loop, in the same transaction, with its locks. */
inline lease_acquire(s, n, id) {
    d_step { begin(s); step = look_up; status = busy; ask(s) }
    do
    :: atomic { step == look_up && attempt == ATTEMPTS -> step = commit }
    :: atomic { step == look_up && attempt < ATTEMPTS ->
        /* select … from lease l left join beat b on b.id = l.beat where l.name = … */
        attempt++;
        r_row = lease[n].row; r_beat = lease[n].beat; r_token = lease[n].token; r_fence = lease[n].fence;
        r_dead = !beat[r_beat].row || beat[r_beat].dead || (declared & (1 << r_beat));
        look(r_beat);
        r_expired = expired; expired = false;
        if
        :: r_row && r_token == id && !r_dead && !r_expired -> step = resend
        :: beat[id].row && !(r_row && r_token == id && !r_dead && !r_expired) ->
            status = beat_lost; step = commit       /* granted, reply lost, and expired: the SQL would start again here */
        :: !beat[id].row && r_row && !r_dead && !r_expired -> status = held; step = commit
        :: !beat[id].row && !r_row -> step = try_name
        :: !beat[id].row && r_row && !r_dead && r_expired -> step = declare
        :: !beat[id].row && r_row && r_dead -> step = steal
        fi }
    :: atomic { step == resend && free_for_no_key_update(n) ->
        /* update lease set holder = … where token = want: a repeated request whose first reply was lost */
        status = acquired; number = r_fence; remaining = beat[r_beat].left; step = commit }
    :: atomic { step == try_name ->
        /* exit when not pg_try_advisory_xact_lock('holdfast.take', name) */
        if
        :: lease[n].take == UNLOCKED || lease[n].take == ME(s) -> lease[n].take = ME(s); step = draw
        :: else -> step = commit
        fi }
    :: d_step { step == draw ->
        /* number := draw(fence) */
        next_fence(); step = insert }
    :: atomic { step == insert && !written(n) ->
        /* insert … on conflict do nothing. It waits for a DELETE of that name that is about to commit. */
        if
        :: !lease[n].row -> lease[n].lock = ME(s); stamp(s); status = acquired; step = redraw
        :: else -> step = look_up
        fi }
    :: d_step { step == redraw ->
        /* if pg_sequence_last_value(…) <> number then number := draw(fence) */
#ifndef NO_REDRAW
        if :: sequence != (number & 15) -> next_fence() :: else fi;
#endif
        step = commit }
    :: atomic { step == declare ->
        /* perform from beat where … not dead and expires_at <= clock_timestamp() for no key update skip locked;
         * update beat set dead = true */
        look(r_beat);
        if
        :: beat[r_beat].lock == UNLOCKED && beat[r_beat].row && !beat[r_beat].dead && expired ->
            beat[r_beat].lock = ME(s); declared = declared | (1 << r_beat); step = steal
        :: else -> step = look_up                   /* busy: a heartbeat is in progress, or has won */
        fi;
        expired = false }
#ifdef THIEF_WAITS
    :: atomic { step == steal && free_for_no_key_update(n) ->
#else
    :: atomic { step == steal ->
#endif
        /* perform from lease where … token = r.token for no key update skip locked */
        if
        :: lease[n].row && lease[n].token == r_token && free_for_no_key_update(n) ->
            lease[n].lock = ME(s); stamp(s); status = acquired; step = draw_again
        :: else -> step = look_up                   /* busy: the beat stays dead, even if this acquire gives up */
        fi }
    :: d_step { step == draw_again ->
        /* number := draw(fence) */
        next_fence(); step = commit }
    :: atomic { step == commit ->
        d_step {
            if
            :: status == acquired && lease[n].lock == ME(s) ->
                assert(number > highest[n]);                                        /* fences strictly rise */
                assert(!lease[n].row || !beat[lease[n].beat].row || beat[lease[n].beat].dead
                       || (declared & (1 << lease[n].beat)));                       /* at most one live grant per name */
                lease[n].row = true; lease[n].beat = id; lease[n].token = id; lease[n].fence = number;
                lease[n].newest = number; highest[n] = number;
                beat[id].row = true; beat[id].left = ticks_left(s);
                remaining = TTL
            :: else
            fi;
            for (i : 0 .. BEATS - 1) {
                if :: declared & (1 << i) -> beat[i].dead = true :: else fi
            }
            if :: status != acquired -> number = 0 :: else fi;
            r_row = false; r_dead = false; r_expired = false; r_beat = 0; r_token = 0; r_fence = 0; attempt = 0; declared = 0;
            end_transaction(s)
        };
        break }
    od
}

/* beat_renew(beat): one UPDATE of the beat row alone. It waits while a takeover locks the row, and then re-checks it. */
inline beat_renew(s, b) {
    d_step { begin(s); status = lost; ask(s) }
    atomic {
        beat[b].lock == UNLOCKED ->
        look(b);
        if
#ifdef RENEW_THE_DEAD
        :: beat[b].row && !expired -> beat[b].lock = ME(s); stamp(s); status = renewed
#else
        :: beat[b].row && !beat[b].dead && !expired -> beat[b].lock = ME(s); stamp(s); status = renewed
#endif
        :: else
        fi;
        expired = false
    };
    /* COMMIT */
    d_step {
        if
        :: status == renewed ->
            assert(!beat[b].dead);                                  /* no renewal of a dead beat */
#ifdef BY_FORCE
            number = beat[b].generation;                            /* returning b.generation */
            r_row = lease[0].row && lease[0].beat == b;             /* for the assertion: what beat_leases would return now */
#endif
            beat[b].left = ticks_left(s); beat[b].lock = UNLOCKED
        :: else
        fi;
        end(s);
        unstamp(s)
    }
}

/* lease_renew(name, token), for callers without a keeper: lease FOR SHARE, then beat. */
inline lease_renew(s, n, id) {
    atomic {
        free_for_share(n) ->
        if
        :: lease[n].row && lease[n].token == id -> lease[n].share = lease[n].share | (1 << s); r_row = true; r_beat = lease[n].beat
        :: else
        fi
    };
    if
    :: r_row -> beat_renew(s, r_beat)
    :: else
    fi;
    d_step { end_transaction(s); r_row = false; r_beat = 0 }           /* COMMIT */
}

/* lease_end, with the lease row locked: delete from lease; update beat set generation = generation + 1, which may wait. */
inline lease_end(s, n, tell) {
    if
    :: r_row && tell -> atomic { beat[r_beat].lock == UNLOCKED -> beat[r_beat].lock = ME(s) }
    :: else
    fi;
    /* COMMIT */
    atomic {
        if
        :: r_row ->
            lease[n].row = false; lease[n].beat = 0; lease[n].token = 0; lease[n].fence = 0;
#ifndef SILENT
            if :: tell -> beat[r_beat].generation++ :: else fi
#else
            skip
#endif
        :: else
        fi;
        r_row = false; r_beat = 0;
        end_transaction(s)
    }
}

/* lease_release(name, holder, token, wait => true, tell). Python calls it with wait => false: it is refused where this waits. */
inline lease_release(s, n, id, tell) {
    /* select … where name = … and token = … for update */
    atomic {
        (free_for_update(n) || lease[n].token != id) ->
        begin(s);
        if
        :: lease[n].row && lease[n].token == id -> lease[n].lock = ME(s); r_row = true; r_beat = lease[n].beat
        :: else
        fi
    };
    lease_end(s, n, tell)
}

/* lease_force_release(name, actor, reason): of any holder. */
inline lease_force_release(s, n) {
    /* select … where name = … for update */
    atomic {
        free_for_update(n) ->
        begin(s);
        if
        :: lease[n].row -> lease[n].lock = ME(s); r_row = true; r_beat = lease[n].beat
        :: else
        fi
    };
    lease_end(s, n, true)
}

#define still_held(n, id) (lease[n].row && lease[n].token == id && beat[lease[n].beat].row && !beat[lease[n].beat].dead && !expired)

/* A user's transaction under the grant `id`: begin, protect, write, commit. Ends with status done or fenced_out. */
inline transaction(s, n, id) {
    d_step { begin(s); step = snapshot }
    do
    :: atomic { step == snapshot ->
        /* BEGIN, and the statement's snapshot: after FOR SHARE has locked the lease row, the lease is re-checked, and the
         * beat is not. */
#ifdef SAVEPOINTS
        if :: savepoint = true :: savepoint = false fi;
#endif
        look(lease[n].beat);
        if
#ifdef IGNORE_BEAT
        :: lease[n].row && lease[n].token == id -> status = done; step = lock_row
#else
        :: still_held(n, id) -> status = done; step = lock_row
#endif
        :: else -> status = fenced_out; step = commit
        fi;
#if PROTECT == AT_COMMIT
        if :: savepoint -> status = fenced_out; step = commit :: else fi;       /* xmin is not the transaction's: HF002 */
#endif
#if PROTECT != AT_START && PROTECT != KEY_SHARE
        if :: step == lock_row -> step = write :: else fi;
#endif
        expired = false }
    :: atomic { step == lock_row && free_for_share(n) ->
        /* select … from lease l join beat b … for share of l */
        if
        :: lease[n].row && lease[n].token == id -> lease[n].share = lease[n].share | (1 << s); step = write
        :: else -> status = fenced_out; step = commit
        fi;
#ifndef IGNORE_SAVEPOINT
        if :: savepoint -> status = fenced_out; step = commit :: else fi        /* check_savepoint: HF002 */
#endif
        }
    :: d_step { step == write ->
        /* insert, update or delete in the user's own tables. ROLLBACK TO releases the locks taken since the savepoint. */
        if :: savepoint -> lease[n].share = lease[n].share & ~(1 << s) :: else fi;
#if PROTECT == AT_COMMIT || PROTECT == RECHECK
        step = check
#else
        step = commit
#endif
        }
#if PROTECT == RECHECK
    :: atomic { step == check ->
        if
        :: lease[n].row && lease[n].token == id
        :: else -> status = fenced_out
        fi;
#else
    :: atomic { step == check && free_for_share(n) ->
        /* the deferred trigger inside COMMIT: perform from lease where name and token for share */
        if
        :: lease[n].row && lease[n].token == id -> lease[n].share = lease[n].share | (1 << s)
        :: else -> status = fenced_out
        fi;
#endif
        step = commit }
    :: atomic { step == commit ->
        d_step {
            if
            :: status == done ->
                assert(number >= lease[n].newest);                      /* effects in fence order */
#if PROTECT == AT_START || PROTECT == AT_COMMIT
                assert(lease[n].row && lease[n].token == id)            /* only by the present holder, even after force */
#endif
            :: else
            fi;
            savepoint = false;
            end_transaction(s)
        };
        break }
    od
}
