/* A libnccl for one process without a GPU: ranks are threads, "streams" are run by a thread for each communicator.
   stub_mode chooses what goes wrong, for the rank of the trainer (0) or for all. As NCCL does for a communicator that
   does not block, a broadcast is put into its stream only a moment after the call has returned "in progress", and until
   then the communicator takes no other call. */
#include <pthread.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { OK, INIT_BLOCKS, INIT_STALLS, BROADCAST_STALLS, ASYNC_ERROR, ABORT_BLOCKS };
typedef struct { char internal[128]; } ncclUniqueId;
typedef struct { int id, joined, size, turn; void *data; size_t count; int taken; } Group;
typedef struct { Group *group; int rank, done, asked, aborted, launched; } Comm;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
static Group groups[256];
static int next_id = 1, mode = OK, broadcasts = 0, aborts = 0;
typedef struct { Comm *comm; void *buffer; size_t count; int root, number; long stream; } Task;
static int asked_of[4096], done_of[4096], misused = 0, destroyed = 0;
enum { LAUNCH_US = 3000 };

void stub_mode(int chosen) { mode = chosen; }
int stub_broadcasts(void) { return broadcasts; }
int stub_aborts(void) { return aborts; }
int stub_destroyed(void) { return destroyed; }
int stub_misused(void) { return misused; }
int stub_asked(long stream) { return asked_of[stream]; }
int stub_done(long stream) { return done_of[stream]; }
const char *ncclGetErrorString(int code) { return code == 6 ? "remote process exited or there was a network error" : "stub error"; }

int ncclGetUniqueId(ncclUniqueId *id) {
  memset(id, 0, sizeof *id);
  pthread_mutex_lock(&lock);
  *(int *)id->internal = next_id++;
  pthread_mutex_unlock(&lock);
  return 0;
}

int ncclCommInitRankConfig(Comm **comm, int size, ncclUniqueId id, int rank, void *config) {
  (void)config;
  if (mode == INIT_BLOCKS && rank == 0) for (;;) sleep(1000);
  Comm *made = calloc(1, sizeof *made);
  made->rank = rank;
  pthread_mutex_lock(&lock);
  made->group = &groups[*(int *)id.internal % 256];
  made->group->size = size;
  made->group->joined++;
  pthread_mutex_unlock(&lock);
  *comm = made;
  return 7;
}

int ncclCommGetAsyncError(Comm *comm, int *state) {
  pthread_mutex_lock(&lock);
  int met = comm->group->joined == comm->group->size;
  pthread_mutex_unlock(&lock);
  *state = met && mode != INIT_STALLS && comm->launched == comm->asked ? 0 : 7;
  if (mode == ASYNC_ERROR && comm->rank == 0 && comm->asked) *state = 6;
  return 0;
}

static void *carry_out(void *argument) {
  Task task = *(Task *)argument;
  Comm *comm = task.comm;
  Group *group = comm->group;
  free(argument);
  usleep(LAUNCH_US);
  pthread_mutex_lock(&lock);
  comm->launched++;
  asked_of[task.stream]++;
  while ((comm->done != task.number || mode == BROADCAST_STALLS) && !comm->aborted) pthread_cond_wait(&changed, &lock);
  if (comm->rank == task.root) {
    while ((group->turn != 2 * task.number) && !comm->aborted) pthread_cond_wait(&changed, &lock);
    if (!comm->aborted) {
      group->data = malloc(task.count + 1);
      memcpy(group->data, task.buffer, task.count);
      group->taken = 0;
      group->turn++;
    }
  }
  pthread_cond_broadcast(&changed);
  while (group->turn != 2 * task.number + 1 && !comm->aborted) pthread_cond_wait(&changed, &lock);
  if (!comm->aborted) {
    if (comm->rank != task.root) memcpy(task.buffer, group->data, task.count);
    if (++group->taken == group->size) { free(group->data); group->turn++; broadcasts++; }
    comm->done++;
  }
  done_of[task.stream]++; /* what is aborted leaves the stream, too */
  pthread_cond_broadcast(&changed);
  pthread_mutex_unlock(&lock);
  return NULL;
}

int ncclBroadcast(const void *from, void *to, size_t count, int type, int root, Comm *comm, void *stream) {
  (void)from; (void)type;
  Task *task = malloc(sizeof *task);
  pthread_mutex_lock(&lock);
  int busy = comm->launched != comm->asked;
  misused += busy;
  if (!busy) *task = (Task){comm, to, count, root, comm->asked++, (long)stream};
  pthread_mutex_unlock(&lock);
  if (busy) { free(task); return 4; } /* "used before the previous operation returned" */
  pthread_t thread;
  pthread_create(&thread, NULL, carry_out, task);
  pthread_detach(thread);
  return 7;
}

int ncclCommAbort(Comm *comm) {
  if (mode == ABORT_BLOCKS) for (;;) sleep(1000);
  pthread_mutex_lock(&lock);
  comm->aborted = 1;
  aborts++;
  pthread_cond_broadcast(&changed);
  pthread_mutex_unlock(&lock);
  return 0;
}

int ncclCommDestroy(Comm *comm) {
  (void)comm;
  pthread_mutex_lock(&lock);
  destroyed++;
  pthread_mutex_unlock(&lock);
  return 0;
}
