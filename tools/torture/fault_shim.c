/* Faults at the border between a process and the kernel, for tests.

   Preloaded (LD_PRELOAD) into a process, this library counts the calls that touch the files of a
   trace, and makes one of them fail, end short, take long, or kill the process. Python and SQLite
   are the installed ones and know nothing of it. `faults.py` compiles it and names the numbers. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

enum { OPEN, READ, WRITE, SYNC, TRUNCATE, LOCK, MAP, RENAME, UNLINK, CLOSE, N_OPS };
enum { TRACE, WAL, SHM, JOURNAL, PART, N_ROLES };
enum { NONE, KILL_BEFORE, KILL_AFTER, KILL_TORN, FAIL, SHORT, SLOW };
#define MOST_FILES 4096
#define NAME ".flextrace"

static int roles[MOST_FILES]; /* of open descriptors: a role + 1, 0 for files of no trace */
static long counts[N_OPS][N_ROLES];
static int op_wanted = -1, role_wanted = -1, action = NONE;
static long first, last, value, n_matching;
static long clock_shift_s, clock_reads;

void torture_arm(int op, int role, long from, long to, int what, long with) {
  op_wanted = op, role_wanted = role, first = from, last = to, value = with, n_matching = 0;
  memset(counts, 0, sizeof counts);
  action = what;
}
long torture_count(int op, int role) { return counts[op][role]; }
long torture_hits(void) { return n_matching >= first ? n_matching - first + 1 : 0; }
void torture_clock(long back_s_per_read) { clock_shift_s = back_s_per_read, clock_reads = 0; }

static int role_of(const char *path) {
  const char *end = path ? strstr(path, NAME) : NULL;
  if (!end) return -1;
  end += strlen(NAME);
  return !*end                      ? TRACE
         : !strcmp(end, "-wal")     ? WAL
         : !strcmp(end, "-shm")     ? SHM
         : !strcmp(end, "-journal") ? JOURNAL
         : !strcmp(end, ".part")    ? PART
                                    : -1;
}

static int role_of_file(int file) { return file >= 0 && file < MOST_FILES ? roles[file] - 1 : -1; }

static void end_here(void) {
  kill(getpid(), SIGKILL);
  for (;;) pause();
}

/* Count a call; return the action that it gets. */
static int enter(int op, int role) {
  if (role < 0) return NONE;
  counts[op][role]++;
  if (action == NONE || (op_wanted >= 0 && op != op_wanted)) return NONE;
  if (role_wanted >= 0 && role != role_wanted) return NONE;
  n_matching++;
  if (n_matching < first || n_matching > last) return NONE;
  if (action == KILL_BEFORE) end_here();
  if (action == SLOW) {
    struct timespec wait = {value / 1000, value % 1000 * 1000000};
    nanosleep(&wait, NULL);
  }
  if (action == FAIL) errno = (int)value;
  return action;
}

static void leave(int did) {
  if (did == KILL_AFTER || did == KILL_TORN) end_here();
}

#define REAL(type, name, ...)                                   \
  static type (*real)(__VA_ARGS__);                             \
  if (!real) real = (type(*)(__VA_ARGS__))dlsym(RTLD_NEXT, name)

#define CALL(type, op, role, expression) \
  int did = enter(op, role);             \
  if (did == FAIL) return -1;            \
  type result = expression;              \
  leave(did);                            \
  return result

#define OPENER(name)                                                              \
  int name(const char *path, int flags, ...) {                                    \
    REAL(int, #name, const char *, int, mode_t);                                  \
    va_list more;                                                                 \
    va_start(more, flags);                                                        \
    mode_t mode = flags & (O_CREAT | __O_TMPFILE) ? va_arg(more, mode_t) : 0;     \
    va_end(more);                                                                 \
    int role = role_of(path), did = enter(OPEN, role);                            \
    if (did == FAIL) return -1;                                                   \
    int file = real(path, flags, mode);                                           \
    if (file >= 0 && file < MOST_FILES) roles[file] = role + 1;                   \
    leave(did);                                                                   \
    return file;                                                                  \
  }
OPENER(open)
OPENER(open64)

static size_t part_of(int did, size_t n) { return (did == SHORT || did == KILL_TORN) && n > 1 ? n / 2 : n; }

#define WRITER(name, place, argument)                                                    \
  ssize_t name(int file, const void *data, size_t n place) {                             \
    REAL(ssize_t, #name, int, const void *, size_t place);                               \
    int did = enter(WRITE, role_of_file(file));                                          \
    if (did == FAIL) return -1;                                                          \
    ssize_t done = real(file, data, part_of(did, n) argument);                           \
    leave(did);                                                                          \
    return done;                                                                         \
  }
#define COMMA ,
WRITER(write, , )
WRITER(pwrite, COMMA off_t at, COMMA at)
WRITER(pwrite64, COMMA off64_t at, COMMA at)

#define READER(name, place, argument)                                              \
  ssize_t name(int file, void *data, size_t n place) {                             \
    REAL(ssize_t, #name, int, void *, size_t place);                               \
    CALL(ssize_t, READ, role_of_file(file), real(file, data, n argument));         \
  }
READER(read, , )
READER(pread, COMMA off_t at, COMMA at)
READER(pread64, COMMA off64_t at, COMMA at)

int fsync(int file) {
  REAL(int, "fsync", int);
  CALL(int, SYNC, role_of_file(file), real(file));
}
int fdatasync(int file) {
  REAL(int, "fdatasync", int);
  CALL(int, SYNC, role_of_file(file), real(file));
}
int ftruncate(int file, off_t n) {
  REAL(int, "ftruncate", int, off_t);
  CALL(int, TRUNCATE, role_of_file(file), real(file, n));
}
int ftruncate64(int file, off64_t n) {
  REAL(int, "ftruncate64", int, off64_t);
  CALL(int, TRUNCATE, role_of_file(file), real(file, n));
}
int rename(const char *from, const char *to) {
  REAL(int, "rename", const char *, const char *);
  CALL(int, RENAME, role_of(from), real(from, to));
}
int unlink(const char *path) {
  REAL(int, "unlink", const char *);
  CALL(int, UNLINK, role_of(path), real(path));
}
int close(int file) {
  REAL(int, "close", int);
  int role = role_of_file(file), did = enter(CLOSE, role);
  if (file >= 0 && file < MOST_FILES) roles[file] = 0;
  int result = real(file);
  leave(did);
  return result;
}

#define LOCKER(name)                                                        \
  int name(int file, int command, ...) {                                    \
    REAL(int, #name, int, int, void *);                                     \
    va_list more;                                                           \
    va_start(more, command);                                                \
    void *argument = va_arg(more, void *);                                  \
    va_end(more);                                                           \
    int is_lock = command == F_SETLK || command == F_SETLKW;                \
    CALL(int, LOCK, is_lock ? role_of_file(file) : -1, real(file, command, argument)); \
  }
LOCKER(fcntl)
LOCKER(fcntl64)

#define MAPPER(name, offset)                                                               \
  void *name(void *at, size_t n, int access, int flags, int file, offset from) {           \
    REAL(void *, #name, void *, size_t, int, int, int, offset);                            \
    int did = enter(MAP, role_of_file(file));                                              \
    if (did == FAIL) return MAP_FAILED;                                                    \
    void *result = real(at, n, access, flags, file, from);                                 \
    leave(did);                                                                            \
    return result;                                                                         \
  }
MAPPER(mmap, off_t)
MAPPER(mmap64, off64_t)

int clock_gettime(clockid_t which, struct timespec *now) {
  REAL(int, "clock_gettime", clockid_t, struct timespec *);
  int result = real(which, now);
  if (clock_shift_s && which == CLOCK_REALTIME) now->tv_sec -= clock_shift_s * ++clock_reads;
  return result;
}
