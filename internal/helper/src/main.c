// The program's start, and what all roles share.

#include "helper.h"

int report_fd = -1;

_Noreturn void quit(int code)
{
	for (;;)
		SYS(exit_group, code, 0, 0, 0, 0);
}

int same(const char *a, const char *b)
{
	while (*a && *a == *b)
		a++, b++;
	return *a == *b;
}

void say(const struct report *r)
{
	// An error means that sbxrun is dead.
	SYS(write, report_fd, r, sizeof *r, 0, 0);
}

_Noreturn void fail(const char *step, long error, int mount)
{
	struct report r = {.kind = REPORT_FAILED, .value = -error, .number = mount};
	for (size_t i = 0; i < sizeof r.step - 1 && step[i]; i++)
		r.step[i] = step[i];
	say(&r);
	quit(125);
}

long must(const char *step, long result)
{
	if (failed(result))
		fail(step, result, 0);
	return result;
}

long receive(int socket, void *data, size_t size, int flags, struct rights *rights, int *count)
{
	struct iovec iov = {data, size};
	struct msghdr msg = {.iov = &iov, .iov_count = 1, .control = rights, .control_size = sizeof *rights};
	long n;
	do {
		msg.control_size = sizeof *rights;
		n = SYS(recvmsg, socket, &msg, flags | MSG_CMSG_CLOEXEC, 0, 0);
	} while (n == -EINTR);
	*count = 0;
	if (!failed(n) && msg.control_size >= RIGHTS_HEADER && rights->level == SOL_SOCKET && rights->type == SCM_RIGHTS)
		*count = (int)((rights->size - RIGHTS_HEADER) / sizeof(int));
	if (!failed(n) && msg.flags & MSG_CTRUNC)
		*count = -1;
	return n;
}

// Empties the arguments. Then ps(1) shows a process by its name, which differs between the keeper and its children.
static void wipe(char **argv)
{
	for (; *argv; argv++)
		for (char *p = *argv; *p; p++)
			*p = 0;
}

// Without the argument, a command has executed /proc/self/exe, which is this file until it executes its own program.
_Noreturn void start(long *stack)
{
	static const char refusal[] = "sbxrun: /proc/self/exe cannot be executed here\n";
	char **argv = (char **)(stack + 1);
	if (stack[0] == 2 && same(argv[1], "keep"))
		wipe(argv), keep();
	SYS(write, 2, refusal, sizeof refusal - 1, 0, 0);
	quit(126);
}
