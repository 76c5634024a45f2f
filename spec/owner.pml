/* An owner that reconnects in less than W ticks is never declared dead, however often it loses its session.
 *
 * The owner of operations, whose keeper locks its key again in each new session; lookers, which find the key free or held; one clock.
 * A loss of the session may come at any step, also between the key and the note, and a heartbeat may never arrive. */
#ifndef W
#define W 2                 /* 0.5 s, in ticks */
#endif
#ifndef LOOKERS
#define LOOKERS 2
#endif
#define FREE 255

bool locked;                /* a session of the owner holds the key, shared */
bool back = true;           /* owner_hold has committed in the present session */
byte out;                   /* ticks since the session was lost, until the owner is back */
byte looking = FREE;        /* the look that holds the key, exclusive, for a moment */

/* The row of the beat. */
byte row = FREE;            /* who has locked it */
bool dead;
byte note;                  /* unseen_at: 1 + ticks since then; 0: null */

byte seen[LOOKERS];         /* unseen_at as a look has read it */
bool stale[LOOKERS];        /* the row has another one by now */

inline write_note(value) {
    for (i : 0 .. LOOKERS - 1) { stale[i] = true }
    i = 0; note = value
}

proctype owner() {
    byte i;
end:
    do
    :: atomic { locked -> locked = false; if :: back -> back = false; out = 0 :: else fi }     /* the session is lost */
    :: atomic { !locked && looking == FREE -> locked = true }          /* owner_hold: pg_try_advisory_lock_shared */
    :: atomic { locked && !back && row == FREE ->                     /* … and the update, COMMIT */
#ifndef ONLY_OTHERS_REMOVE
        write_note(0);
#endif
        back = true; out = 0 }
    :: atomic { back && row == FREE -> write_note(0) }                    /* beat_renew */
    od
}

/* beat_look. One atomic block is one statement. */
proctype looker(byte me) {
    bool is_free; byte i;
end:
    do
    :: atomic { !dead -> seen[me] = note; stale[me] = false };
        atomic {
            is_free = !locked && looking == FREE;
            if :: is_free -> looking = me :: else fi };
        atomic { if :: is_free -> looking = FREE :: else fi };
        if
        :: !is_free && seen[me] == 0                                   /* it lives */
        :: is_free && seen[me] > 0 && seen[me] <= W                    /* too early */
        :: else ->
            if
            :: atomic { row == FREE && !dead && (note > 0) == (seen[me] > 0) && (note == 0 || !stale[me]) -> row = me };
                if
#ifdef ONE_LOOK
                :: is_free -> dead = true
#else
#ifdef NOTED_UNCHECKED
                :: atomic { is_free && seen[me] == 0 -> write_note(1) }
#else
                :: atomic { is_free && seen[me] == 0 && !locked && looking == FREE -> write_note(1) }
#endif
                :: atomic { is_free && seen[me] > 0 && !locked && looking == FREE -> dead = true }
#endif
                :: atomic { locked ->
#ifndef NOTE_STAYS
                    write_note(0)
#endif
                    }
                :: else                                                /* another look has the key */
                fi;
                row = FREE                                             /* COMMIT */
            :: else                                                    /* SKIP LOCKED, or it has changed */
            fi
        fi;
        assert(!dead);
        atomic { is_free = false; seen[me] = 0; stale[me] = false }
    od
}

proctype clock() {
    byte i;
end:
    do
    :: d_step { back || out < W - 1 ->                                 /* it reconnects in less than W ticks */
        if :: !back -> out++ :: else fi;
        if :: note > 0 && note <= W -> note++ :: else fi;
        for (i : 0 .. LOOKERS - 1) {
            if :: seen[i] > 0 && seen[i] <= W -> seen[i]++ :: else fi
        }
        i = 0 }
    od
}

init {
    byte i;
    atomic {
        locked = true;
        run owner(); run clock();
        for (i : 0 .. LOOKERS - 1) { run looker(i) }
        i = 0
    }
}
