// Warm rooms: the maker of inits, and a payload that waits for its command. And the exec of a command.

#include "helper.h"

// The maker stays in a room and makes an init on request, before the init's command is known. Each request has the
// init's socket, gate and timer.
//
// The inits share the maker's memory.
static struct made {
	const struct script *script;
	uint32_t at;
	int place;
	int fds[3];
} made[PLACES];

static void begin(void *arg)
{
	static const int numbers[] = {ENTRY_SOCKET, ENTRY_GATE, ENTRY_TIMER};
	const struct made *m = arg;
	struct process p = {.place = m->place};
	// They were received in this order, above the maker's own, so no dup3 replaces one that is still needed.
	for (int i = 0; i < 3; i++)
		if (m->fds[i] != numbers[i])
			SYS(dup3, m->fds[i], numbers[i], O_CLOEXEC, 0, 0);
	SYS(close_range, ENTRY_FILES, ~0u, 0, 0, 0);
	run(&p, m->script, m->at);
}

_Noreturn void make(struct process *p, const struct script *s, uint64_t flags, uint32_t init)
{
	static const char step[] = "make a PID namespace in the room";
	static char stacks[PLACES][STACK_SIZE] __attribute__((aligned(16)));
	for (int place = 0;; place = (place + 1) % PLACES) {
		char byte;
		int count;
		long n = receive(ENTRY_SOCKET, &byte, 1, 0, &p->rights, &count);
		if (n == 0 || failed(n))
			quit(0); // sbxrun is dead or has closed the socket
		if (count != 3)
			fail(step, -EMFILE, 0);
		made[place] = (struct made){s, init, place, {p->rights.fds[0], p->rights.fds[1], p->rights.fds[2]}};
		must(step, clone_on(flags | CLONE_PARENT | SIGCHLD, stacks[place] + STACK_SIZE, begin, &made[place]));
		must(step, SYS(close_range, ENTRY_TIMER, ~0u, 0, 0, 0));
	}
}

// The address of the command's script. The memory is the maker's, so the script of the command before the last is still
// there.
static const uintptr_t script_at = 0x2000000000;

_Noreturn void take_command(struct process *p, int gate)
{
	static const char step[] = "receive the command";
	char byte;
	int count;
	long n = must(step, receive(gate, &byte, 1, 0, &p->rights, &count));
	const int *fds = p->rights.fds;
	uintptr_t at = script_at + (uintptr_t)p->place * MAX_SCRIPT;
	if (n == 0)
		quit(0); // sbxrun is dead or has given up
	if (count != 4)
		fail(step, -EMFILE, 0);
	SYS(munmap, at, MAX_SCRIPT, 0, 0, 0);
	const struct script *s = load(fds[3], at);
	for (int i = 0; i < 3; i++)
		must(step, SYS(dup3, fds[i], i, 0, 0, 0));
	for (int i = 0; i < 4; i++)
		SYS(close, fds[i], 0, 0, 0, 0);
	run(p, s, 0);
}

// Executes the first of the paths that is a program, as execvp(3) does. The last path is followed by a null pointer.
// argv[-1] is free for the shell. It returns an error.
long execute(char *const *paths, char **argv, char *const *envp)
{
	static char shell[] = "/bin/sh";
	long error = -ENOENT;
	for (; *paths; paths++) {
		long r = SYS(execve, *paths, argv, envp, 0, 0);
		if (r == -ENOEXEC) { // a script without an interpreter line
			char *name = argv[0];
			argv[-1] = shell;
			argv[0] = *paths;
			r = SYS(execve, shell, argv - 1, envp, 0, 0);
			argv[0] = name;
		}
		if (r == -ENOENT || r == -ENOTDIR)
			continue;
		error = r;
		if (r != -EACCES)
			break;
	}
	return error;
}
