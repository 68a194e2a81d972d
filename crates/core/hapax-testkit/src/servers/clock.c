/* A wall clock that is off by as many seconds as a file says, for a server that is started with
 * this in LD_PRELOAD and the file's name in HAPAX_TEST_CLOCK. System calls only: allocators ask
 * for the time before anything else works. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static time_t offset(void)
{
    static int file = -1;
    char text[24] = {0};
    if (file < 0) {
        const char *name = getenv("HAPAX_TEST_CLOCK");
        if (!name)
            return 0;
        file = (int)syscall(SYS_openat, AT_FDCWD, name, O_RDONLY | O_CLOEXEC);
    }
    if (file < 0 || syscall(SYS_pread64, file, text, sizeof text - 1, 0) <= 0)
        return 0;
    return strtol(text, NULL, 10);
}

int clock_gettime(clockid_t which, struct timespec *now)
{
    int failed = (int)syscall(SYS_clock_gettime, which, now);
    if (!failed && (which == CLOCK_REALTIME || which == CLOCK_REALTIME_COARSE))
        now->tv_sec += offset();
    return failed;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone)
{
    struct timespec precise;
    int failed = clock_gettime(CLOCK_REALTIME, &precise);
    (void)zone;
    now->tv_sec = precise.tv_sec;
    now->tv_usec = precise.tv_nsec / 1000;
    return failed;
}

time_t time(time_t *out)
{
    struct timespec precise;
    clock_gettime(CLOCK_REALTIME, &precise);
    if (out)
        *out = precise.tv_sec;
    return precise.tv_sec;
}
