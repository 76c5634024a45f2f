/* Loaded into a PostgreSQL server (LD_PRELOAD), makes every flush take at least two milliseconds, as on a network disk. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <time.h>

static int slowly(const char *name, int file) {
    struct timespec end;
    clock_gettime(CLOCK_MONOTONIC, &end);
    int result = ((int (*)(int))dlsym(RTLD_NEXT, name))(file);
    end.tv_nsec += 2000000;
    end.tv_sec += end.tv_nsec / 1000000000;
    end.tv_nsec %= 1000000000;
    while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &end, NULL) == EINTR) {
    }
    return result;
}

int fsync(int file) { return slowly("fsync", file); }

int fdatasync(int file) { return slowly("fdatasync", file); }
