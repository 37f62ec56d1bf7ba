// A command's init, PID 1 of its namespace: it reaps, delivers signals, and reports the command's end. It blocks all
// signals; everything reaches it through descriptors.

#include "helper.h"

// The exit code at the deadline that sbxrun has set in init's timer.
enum { LATE = 124 };

// Children reaped before the next look at the socket, so that a payload that makes orphans faster than that delays
// neither the report of its own end nor an order.
enum { REAPED_AT_ONCE = 256 };

// A signal to deliver.
struct order {
	int32_t signal;
	int32_t payload; // 1 for the payload alone, 0 for all processes
};

// A process that made init its tracer (PTRACE_TRACEME needs no permission) stops, and wait(2) reports that (ptrace(2)).
// Detach from it. It gets the signal that stopped it, except SIGTRAP, which stops a traced process at an exec.
static void let_run(int pid, int status)
{
	int signal = status >> 8 & 0x7f;
	SYS(ptrace, PTRACE_DETACH, pid, 0, signal == SIGTRAP ? 0 : signal, 0); // ESRCH: it was killed
}

// Reaps children and reports the payload's end. Without children the namespace is empty, and init exits. It returns
// whether there may be more to reap.
static int reap(int *payload)
{
	struct report r = {0};
	int more = 1;
	for (int n = 0; more && n < REAPED_AT_ONCE; n++) {
		int status;
		long pid = SYS(wait4, -1, &status, WNOHANG, 0, 0);
		if (pid == -EINTR)
			continue;
		if (pid == 0 || failed(pid)) {
			more = 0;
			if (pid == -ECHILD)
				r.number = 1;
		} else if ((status & 0xff) == 0x7f) {
			let_run((int)pid, status);
		} else if (pid == *payload) {
			*payload = 0;
			timespec now = {0, 0};
			SYS(clock_gettime, CLOCK_MONOTONIC, &now, 0, 0, 0);
			r.kind = REPORT_EXITED;
			r.value = status;
			r.at = now.tv_sec * 1000000000 + now.tv_nsec;
		}
	}
	if (r.kind != 0)
		say(&r);
	if (r.number != 0)
		quit(0);
	return more;
}

static void deliver(int payload)
{
	struct order o;
	long n = SYS(recvfrom, ENTRY_SOCKET, &o, sizeof o, MSG_DONTWAIT, 0);
	if (n == -EAGAIN || n == -EINTR)
		return;
	if (n != sizeof o)
		quit(0); // sbxrun is dead or has closed the socket
	if (!o.payload)
		SYS(kill, -1, o.signal, 0, 0, 0); // all processes but this one (kill(2))
	else if (payload != 0)
		SYS(kill, payload, o.signal, 0, 0, 0);
}

_Noreturn void be_init(int signals, int payload, int timer)
{
	struct pollfd poll[] = {{signals, POLLIN, 0}, {ENTRY_SOCKET, POLLIN, 0}, {timer, POLLIN, 0}};
	int count = timer < 0 ? 2 : 3;
	char signal[128]; // struct signalfd_siginfo
	for (;;) {
		timespec none = {0, 0};
		int more = reap(&payload);
		long n = SYS(ppoll, poll, count, more ? &none : 0, 0, 0);
		// The payload has the same UID and may lower init's limits. With RLIMIT_NOFILE below count, poll(2) fails with
		// EINVAL, and init would miss orders and the timer.
		if (failed(n) && n != -EINTR)
			quit(0);
		SYS(read, signals, signal, sizeof signal, 0, 0);
		if (count == 3 && poll[2].revents != 0)
			quit(LATE); // sbxrun is stopped
		if (poll[1].revents != 0)
			deliver(payload);
	}
}
