// The keeper is the parent of everything in a sandbox. It starts what sbxrun orders, reaps all, kills all when sbxrun
// dies or asks for it, and exits when nothing is left.

#include "helper.h"

// Its descriptors. sbxrun passes the socket; the keeper opens the others before it has children, because if it ran
// out of descriptors later, it could not end a running command.
enum { SOCKET, LIST, SIGNALS };

enum { ORDER_CHILD = 1, ORDER_DEADLINE, ORDER_LEAVE_TERMINALS, ORDER_FILES };

enum { MAX_TERMINALS = 3, TERMIOS = 44, MAX_FILES = 4096, REMOVE_SIZE = 8192, MAX_ENDED = 8 };

// What sbxrun sends. The descriptors of ORDER_CHILD are the child's script and files, terminals, and files to hold. The
// first of them come with ORDER_FILES if there are more than fit into one message.
// internal/proc has the same layout.
struct order {
	uint32_t kind;
	uint32_t child;       // 1: there is a child
	int64_t deadline;     // ORDER_DEADLINE: CLOCK_MONOTONIC in ns: the time to kill everything
	uint32_t files;       // become descriptors 0, 1, 2 … of the child
	uint32_t program;     // 1: the child executes a program, at whose end everything is killed
	int32_t cgroup;       // number of the file that is the child's cgroup (v2), or -1
	uint32_t terminals;   // to restore at the end
	uint32_t held;        // files that stay open, with their locks
	uint32_t lasting;     // 1: report each end at once
	uint32_t remove_size; // of remove
	char oom[8];          // the keeper's oom_score_adj as text; "" to leave it
	uint8_t states[MAX_TERMINALS][TERMIOS];
	char remove[REMOVE_SIZE]; // paths of cgroups to remove at the end, each followed by a NUL
};

struct ended {
	int64_t pid, status, user, system; // times in µs, with the children that it had reaped
	int64_t maxrss;                    // KiB
};

enum { RECORD_EMPTY = 10, RECORD_REAPED };

// What the keeper reports besides failures. internal/proc has the same layout.
struct record {
	int64_t kind;
	int64_t late;            // the keeper killed everything at the deadline because sbxrun had not
	int64_t program, status; // 1 if there was a program, and its wait status
	int64_t count;           // of the reaped processes, of which the first are listed
	struct ended ended[MAX_ENDED];
};

struct usage { // struct rusage (getrusage(2)), up to the last member used
	int64_t user_sec, user_usec, system_sec, system_usec, maxrss, rest[11];
};

static struct order order;
static struct record record;
static int received[MAX_FILES]; // descriptors for ORDER_CHILD
static uint32_t received_count;
static int terminals[MAX_TERMINALS];
static uint32_t terminal_count;
static uint8_t states[MAX_TERMINALS][TERMIOS];
static char cgroups[REMOVE_SIZE];
static uint32_t cgroups_size;
static int64_t deadline; // 0 for none
static int monitor;      // PID of the program
static int lasting;
static int ending;       // sbxrun has asked for the end or is dead, or the deadline has passed
static int orphaned;     // sbxrun has closed its end or is dead
static int unread;       // the list of children could not be read

static const char fork_step[] = "fork";
static const char files_step[] = "hand over descriptors";

static long write_file(const char *path, const char *text)
{
	size_t size = 0;
	while (text[size])
		size++;
	long fd = SYS(openat, AT_FDCWD, path, O_WRONLY | O_CLOEXEC, 0, 0);
	if (failed(fd))
		return fd;
	long n = SYS(write, fd, text, size, 0, 0);
	SYS(close, fd, 0, 0, 0, 0);
	return n;
}

static void set_up(void)
{
	static const char signals_step[] = "set up signals";
	uint64_t set = ~0ull;
	uint64_t action[4] = {0}; // struct kernel_sigaction: SIG_DFL
	report_fd = SOCKET;
	// All signals stay blocked: only SIGKILL can end the keeper before its work is done.
	must(signals_step, SYS(rt_sigprocmask, SIG_SETMASK, &set, 0, 8, 0));
	// exec keeps SIG_IGN, and a bwrap before 0.11.1 that ignores SIGCHLD hangs forever.
	for (int n = 1; n <= 64; n++)
		if (n != SIGKILL && n != SIGSTOP)
			SYS(rt_sigaction, n, action, 0, 8, 0);
	must("take a name", SYS(prctl, PR_SET_NAME, "sbxrun-keeper", 0, 0, 0));
	must("become a subreaper", SYS(prctl, PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0));
	// Close what sbxrun has inherited without close-on-exec.
	must(files_step, SYS(close_range, SOCKET + 1, ~0u, 0, 0, 0));
	must("open /proc/thread-self/children (CONFIG_PROC_CHILDREN)", SYS(openat, AT_FDCWD, "/proc/thread-self/children", O_RDONLY | O_CLOEXEC, 0, 0));
	set = 1ull << (SIGCHLD - 1);
	must(signals_step, SYS(signalfd4, -1, &set, 8, SFD_NONBLOCK | O_CLOEXEC, 0));
	keeper_pid = (int)SYS(getpid, 0, 0, 0, 0, 0);
}

// Becomes the child that order describes: moves its files to 0, 1, 2 …, closes all others, and runs its script.
// Received descriptors are in ascending order above the keeper's, so no dup3 replaces one that is still needed.
static _Noreturn void be_child(const int *fds)
{
	static struct process p;
	const struct script *s = load(fds[0], 0);
	int count = (int)order.files;
	long socket = 0;
	if (order.program)
		socket = must(files_step, SYS(fcntl, SOCKET, F_DUPFD_CLOEXEC, fds[count] + 1, 0, 0));
	for (int i = 0; i < count; i++) {
		if (fds[i + 1] <= i)
			fail(files_step, -EBADF, 0);
		must(files_step, SYS(dup3, fds[i + 1], i, order.program || i < 3 ? 0 : O_CLOEXEC, 0, 0));
	}
	report_fd = ENTRY_SOCKET;
	if (order.program) { // it reports to the keeper's socket
		report_fd = count;
		SYS(dup3, socket, count++, O_CLOEXEC, 0, 0);
	}
	SYS(close_range, count, ~0u, 0, 0, 0);
	run(&p, s, 0);
}

// Forks the child, into its cgroup if it has one (clone3(2), CLONE_INTO_CGROUP, Linux 5.7). Where the kernel has no
// clone3 or a container engine filters it, the child moves itself.
static long spawn(const int *fds)
{
	long pid = -ENOSYS;
	if (order.cgroup >= 0 && (uint32_t)order.cgroup < order.files) {
		struct { // struct clone_args of linux/sched.h
			uint64_t flags, pidfd, child_tid, parent_tid, exit_signal, stack, stack_size, tls, set_tid, set_tid_size, cgroup;
		} args = {.flags = CLONE_INTO_CGROUP, .exit_signal = SIGCHLD, .cgroup = (uint64_t)fds[order.cgroup + 1]};
		pid = SYS(clone3, &args, sizeof args, 0, 0, 0);
		if (pid == -EAGAIN || pid == -ENOMEM)
			fail(fork_step, pid, 0);
		born_in_cgroup = pid == 0;
	}
	if (failed(pid))
		pid = must(fork_step, sys(__NR_clone, SIGCHLD, 0, 0, 0, 0, 0));
	if (pid == 0)
		be_child(fds);
	return pid;
}

static void keep_files(const struct rights *rights, int count)
{
	if (count < 0 || (uint32_t)count > MAX_FILES - received_count)
		fail(files_step, -EMFILE, 0); // the kernel drops those for which there is no number
	for (int i = 0; i < count; i++)
		received[received_count++] = rights->fds[i];
}

static void start_child(void)
{
	uint32_t files = order.child ? order.files + 1 : 0;
	if (order.terminals > MAX_TERMINALS || order.held > MAX_FILES || order.files > MAX_FILES ||
	    (order.remove_size > 0 && order.remove[order.remove_size - 1] != 0))
		fail(files_step, -EINVAL, 0);
	if (received_count != files + order.terminals + order.held)
		fail(files_step, -EMFILE, 0);
	received_count = 0;
	if (order.oom[0])
		write_file("/proc/self/oom_score_adj", order.oom);
	lasting = (int)order.lasting;
	terminal_count = order.terminals;
	for (uint32_t i = 0; i < order.terminals; i++) {
		terminals[i] = received[files + i];
		memcpy(states[i], order.states[i], TERMIOS);
	}
	memcpy(cgroups, order.remove, order.remove_size);
	cgroups_size = order.remove_size;
	if (!order.child)
		return;
	long pid = spawn(received);
	if (order.program)
		monitor = (int)pid;
	else // not earlier: an undumpable process may not write to its own /proc/self/oom_score_adj
		SYS(prctl, PR_SET_DUMPABLE, 0, 0, 0, 0);
	for (uint32_t i = 0; i < files; i++)
		SYS(close, received[i], 0, 0, 0, 0);
}

// Whether n bytes of order were received and are an order.
static int complete(long n)
{
	const long fixed = offsetof(struct order, remove);
	return n >= fixed && order.remove_size <= REMOVE_SIZE && n == fixed + order.remove_size;
}

// Reads one message of sbxrun. At end-of-file everything ends.
static void take_order(int flags)
{
	static struct rights rights;
	int count;
	long n = receive(SOCKET, &order, sizeof order, flags, &rights, &count);
	if (n == -EAGAIN)
		return;
	if (!complete(n)) {
		ending = 1;
		return;
	}
	switch (order.kind) {
	case ORDER_FILES:
		keep_files(&rights, count);
		break;
	case ORDER_CHILD:
		keep_files(&rights, count);
		start_child();
		break;
	case ORDER_DEADLINE:
		deadline = order.deadline;
		break;
	case ORDER_LEAVE_TERMINALS: // sbxrun is in the background
		terminal_count = 0;
		break;
	}
}

// Restores the terminals. If sbxrun has done so, this has no effect. The keeper has no controlling terminal, so job
// control does not stop it (tty_ioctl(4)).
static void restore_terminals(void)
{
	// An ending keeper has stopped reading orders. An unread one may say that the terminals belong to another job.
	static struct rights rights;
	int count;
	for (;;) {
		long n = receive(SOCKET, &order, sizeof order, MSG_DONTWAIT, &rights, &count);
		if (complete(n) && order.kind == ORDER_LEAVE_TERMINALS)
			return;
		if (failed(n) || n == 0)
			break;
	}
	for (uint32_t i = 0; i < terminal_count; i++)
		SYS(ioctl, terminals[i], TCSETS, states[i], 0, 0);
}

// With terminals or cgroups, waits until sbxrun has forwarded the last output, restored the terminals and read the
// cgroups' counters, or is dead.
static void linger(void)
{
	struct pollfd poll = {SOCKET, 0, 0}; // POLLHUP is always reported
	if (terminal_count == 0 && cgroups_size == 0)
		return;
	while (!orphaned && poll.revents == 0)
		SYS(ppoll, &poll, 1, 0, 0, 0);
}

// Removes the cgroups, trying for a second: one stays busy briefly after its last process was reaped. If this fails,
// sbxrun cleanup can still do it.
static void remove_cgroups(void)
{
	enum { TRIES = 500, AT_REMOVE_DIRECTORY = 0x200 };
	static const timespec pause = {0, 2000000};
	for (uint32_t i = 0; i < cgroups_size; i++) {
		for (int n = 0; n < TRIES; n++) {
			if (SYS(unlinkat, AT_FDCWD, cgroups + i, AT_REMOVE_DIRECTORY, 0, 0) != -EBUSY)
				break;
			SYS(nanosleep, &pause, 0, 0, 0, 0);
		}
		while (cgroups[i])
			i++;
	}
}

static void end(void)
{
	record.kind = RECORD_EMPTY;
	SYS(write, SOCKET, &record, sizeof record, 0, 0); // an error means that sbxrun is dead
	linger();
	if (!orphaned) // otherwise they are restored already and may now belong to another job
		restore_terminals();
	remove_cgroups();
	quit(0);
}

// Reaps all children that have ended, in a loop because SIGCHLD coalesces (signal(7)). Without children the keeper
// reports that and exits.
static void reap(void)
{
	for (;;) {
		int status;
		struct usage usage;
		long pid = SYS(wait4, -1, &status, WNOHANG, &usage, 0);
		if (pid == -EINTR)
			continue;
		if (pid == -ECHILD)
			end();
		if (pid == 0 || failed(pid))
			return;
		if (pid == monitor) {
			// bwrap has ended with the room or was killed. In the latter case its child may not have set its death
			// signal yet (bubblewrap #633), or may wait forever for bwrap to write its UID map.
			ending = 1;
			record.program = 1;
			record.status = status;
		}
		if (lasting) {
			record.count = 0;
			record.kind = RECORD_REAPED;
		}
		if (record.count < MAX_ENDED)
			record.ended[record.count] = (struct ended){pid, status, usage.user_sec * 1000000 + usage.user_usec, usage.system_sec * 1000000 + usage.system_usec, usage.maxrss};
		record.count++;
		if (lasting)
			SYS(write, SOCKET, &record, sizeof record, 0, 0);
	}
}

// Sends SIGKILL to all children. The next call finds the processes that are reparented to the keeper when these die.
// Their PIDs cannot be reused, because only the keeper reaps them.
static void kill_children(void)
{
	static char text[512];
	long n = SYS(pread64, LIST, text, sizeof text, 0, 0);
	// The kernel may have no memory for the text, and an OOM kill may be the reason for this call.
	unread = failed(n);
	int pid = 0;
	for (long i = 0; i < n; i++) {
		if (text[i] >= '0' && text[i] <= '9') {
			pid = pid * 10 + (text[i] - '0');
			continue;
		}
		// A space follows every PID, so one cut off by the end of the text is ignored.
		if (pid > 1)
			SYS(kill, pid, SIGKILL, 0, 0, 0);
		pid = 0;
	}
}

// Waits until a child has ended, sbxrun has sent an order or is dead, or the deadline has passed.
static void wait_for_events(void)
{
	struct pollfd poll[] = {{SIGNALS, POLLIN, 0}, {SOCKET, POLLIN, 0}};
	timespec now = {0, 0};
	const timespec *timeout = 0;
	if (ending) {
		poll[1].events = 0; // the socket stays readable; POLLHUP is always reported
	} else if (deadline != 0) {
		SYS(clock_gettime, CLOCK_MONOTONIC, &now, 0, 0, 0);
		int64_t left = deadline - now.tv_sec * 1000000000 - now.tv_nsec;
		if (left <= 0) {
			ending = 1;
			record.late = 1;
			return;
		}
		now.tv_sec = left / 1000000000;
		now.tv_nsec = left % 1000000000;
		timeout = &now;
	}
	if (unread) { // again soon: the children may not end by themselves
		now.tv_sec = 0;
		now.tv_nsec = 2000000;
		timeout = &now;
	}
	char signal[512];
	SYS(ppoll, poll, orphaned ? 1 : 2, timeout, 0, 0);
	SYS(read, SIGNALS, signal, sizeof signal, 0, 0);
	if (orphaned || poll[1].revents == 0)
		return;
	if (!ending)
		take_order(MSG_DONTWAIT);
	if (!ending)
		return;
	// sbxrun may have shut down its end without closing it: then it still reads records.
	orphaned = (poll[1].revents & POLLHUP) != 0;
	if (orphaned)
		restore_terminals();
}

_Noreturn void keep(void)
{
	set_up();
	do
		take_order(0);
	while (!ending && order.kind == ORDER_FILES);
	for (;;) {
		reap();
		if (ending)
			kill_children();
		wait_for_events();
	}
}
