// The helper is the program of the keeper, of the processes that enter a room, and of a command's init. A room's PID 1 is
// a second program (hold.c). The helper makes no decisions: sbxrun sends it scripts (script.c), and the rest of this code
// waits, reaps and kills.
//
// It is one static program without a library. It allocates nothing: all memory is static, or the mapping of a script.

#ifndef HELPER_H
#define HELPER_H

#include <asm/unistd.h>
#include <linux/errno.h>
#include <linux/fcntl.h>
#include <linux/time_types.h>
#include <stddef.h>
#include <stdint.h>

// Constants and structures that the kernel's headers lack, or define only together with others that conflict.
#define SIGKILL 9
#define SIGTRAP 5
#define SIGCHLD 17
#define SIGSTOP 19
#define SIG_SETMASK 2
#define POLLIN 1
#define POLLHUP 16
#define WNOHANG 1
#define CLONE_VM 0x100
#define CLONE_PARENT 0x8000
#define CLONE_INTO_CGROUP 0x200000000ull
#define PR_SET_PDEATHSIG 1
#define PR_SET_DUMPABLE 4
#define PR_SET_NAME 15
#define PR_SET_CHILD_SUBREAPER 36
#define PTRACE_DETACH 17
#define TCSETS 0x5402
#define SOL_SOCKET 1
#define SCM_RIGHTS 1
#define MSG_CTRUNC 0x8
#define MSG_DONTWAIT 0x40
#define MSG_CMSG_CLOEXEC 0x40000000
#define SFD_NONBLOCK O_NONBLOCK
#define CLOCK_MONOTONIC 1
#define PROT_READ 1
#define PROT_WRITE 2
#define MAP_PRIVATE 2
#define MAP_FIXED 16

typedef struct __kernel_timespec timespec;

struct pollfd {
	int fd;
	int16_t events, revents;
};

struct iovec {
	void *base;
	size_t size;
};

struct msghdr {
	void *name;
	int name_size;
	struct iovec *iov;
	size_t iov_count;
	void *control;
	size_t control_size;
	unsigned flags;
};

// The most descriptors in one message (unix(7), SCM_MAX_FD).
#define MAX_RIGHTS 253

// A control message with descriptors (cmsg(3)).
struct rights {
	size_t size;
	int level, type;
	int fds[MAX_RIGHTS + 1];
};

#define RIGHTS_HEADER offsetof(struct rights, fds)

// A system call with its raw result: an error is a number from -4095 to -1.
long sys(long number, long a, long b, long c, long d, long e, long f);
#define SYS(name, a, b, c, d, e) sys(__NR_##name, (long)(a), (long)(b), (long)(c), (long)(d), (long)(e), 0)

// Continues in a new process, made by clone(2) with flags, and exits in this one. It returns an error, or 0 in the
// new process, which shares the memory and the stack: this one no longer uses them.
long become(unsigned long flags);

// Calls run in a new process, which has its own stack and shares the memory. It returns the process's PID, or an
// error. Sharing costs a tenth of a copy of the memory.
long clone_on(unsigned long flags, void *stack, void (*run)(void *), void *arg);

static inline int failed(long result)
{
	return result < 0 && result >= -4095;
}

void *memcpy(void *to, const void *from, size_t size);
_Noreturn void quit(int code);
int same(const char *a, const char *b);

// What processes report to sbxrun. internal/helper has the same layout.
struct report {
	int64_t kind;
	int64_t value;  // failed: errno; exited: wait status; ready: inode of the PID namespace
	int64_t number; // failed: number of the mount, from 1, or 0; ready: result of getpid(2); exited: 1 if no process is left
	int64_t at;     // exited: CLOCK_MONOTONIC in ns
	char step[64];  // failed: text
};

enum { REPORT_READY = 1, REPORT_FAILED, REPORT_EXITED }; // further kinds are the scripts'

// The descriptor for reports. A report is one message of a SOCK_SEQPACKET socket, so it is never cut.
extern int report_fd;

void say(const struct report *r);
// Reports a failed step, with a negative errno, and exits.
_Noreturn void fail(const char *step, long error, int mount);
long must(const char *step, long result);

// Receives a message and its descriptors. It returns the size of the message, 0 at end-of-file, or an error; *count is
// the number of descriptors, or -1 if some were lost for lack of free descriptors.
long receive(int socket, void *data, size_t size, int flags, struct rights *rights, int *count);

// A script, as internal/helper lays it out: this header, the calls, and the data.
struct script {
	uint32_t size;   // of all
	uint32_t calls;  // number of calls
	uint32_t data;   // offset of the data
	uint32_t fixups; // offset, in the data, of a list of offsets of words that become pointers
	uint32_t fixup_count;
	uint32_t reserved;
};

struct call {
	int32_t number;     // of a system call, or an OP
	uint32_t step;      // its text
	uint16_t mount;     // number of the mount, from 1, for reports
	uint8_t result;     // slot for the result
	uint8_t slots;      // bit n: args[n] is the number of a slot, which holds the value
	uint8_t pointers;   // bit n: args[n] is an offset in the data
	uint8_t skip;       // number of calls to skip after an allowed error
	uint8_t over;       // number of calls to skip after success
	uint8_t unborn;     // skip this call if the process was born in its cgroup
	uint8_t allowed[4]; // errors that do not end the script; 255 is any
	uint32_t reserved;
	uint64_t args[6];
};

enum { SLOTS = 256, ANY_ERROR = 255, MAX_SCRIPT = 32 << 20 };

// Operations besides system calls. A comment names the arguments.
enum {
	OP_EXIT = -1,        // code
	OP_SET = -2,         // value: the result
	OP_CHECK = -3,       // result of an earlier call: fails if that is an error
	OP_FORK = -4,        // clone flags, index of the child's first call
	OP_PARENT = -5,      // fails unless the parent is the keeper
	OP_RECEIVE = -6,     // socket, number of descriptors, first slot; exits at end-of-file
	OP_AWAIT = -7,       // file: waits for a byte; exits at end-of-file
	OP_SAME_FILE = -8,   // statx, major and minor device, inode
	OP_SAME_MOUNT = -9,  // statx, statx
	OP_READY = -10,      // statx of the PID namespace, result of getpid(2), number of descriptors, first slot
	OP_SAY = -11,        // kind, number of descriptors, first slot
	OP_EXEC = -12,       // paths, argv, envp
	OP_INIT = -13,       // signalfd, the payload's PID, timerfd or -1
	OP_MAKE = -14,       // clone flags, index of an init's first call
	OP_LOAD = -15,       // socket: receives stdin, stdout, stderr and a script, and runs it
	OP_BECOME = -16,     // clone flags: the script continues in a new process, and this one exits
};

// Maps a script at an address, 0 for any. Exits if it is malformed.
const struct script *load(int fd, uintptr_t at);
// The part of load that works on memory; returns 0 if the script is malformed.
int relocate(struct script *s, size_t size);

// A process that runs scripts. Several may share the memory, so each has its own on its stack.
struct process {
	int place; // number of its stacks: see PLACES
	uint64_t slots[SLOTS];
	struct rights rights;
	struct beginning { // of its child, which reads it while this process continues
		const struct process *parent;
		const struct script *script;
		uint32_t at;
	} child;
};

// Runs a script from a call on, with the slots of p.
_Noreturn void run(struct process *p, const struct script *s, uint32_t at);

// Numbers of inits that may exist at a time: of the running command and of the next one. Each has a stack for itself and
// one for its payload.
enum { PLACES = 2, STACK_SIZE = 16 << 10 };
extern int born_in_cgroup;
extern int keeper_pid;

// Descriptors of the processes that enter a room, after the command's 0, 1 and 2. internal/enter has the same numbers.
enum { ENTRY_SOCKET = 3, ENTRY_GATE, ENTRY_TIMER, ENTRY_FILES };

// Roles. They do not return.
_Noreturn void keep(void);
_Noreturn void be_init(int signals, int payload, int timer);
_Noreturn void make(struct process *p, const struct script *s, uint64_t flags, uint32_t init);
_Noreturn void take_command(struct process *p, int gate);
long execute(char *const *paths, char **argv, char *const *envp);

#endif
