// Scripts: system calls with descriptor slots, laid out by sbxrun and made here in order. There are no loops; a call
// can only skip calls after it. A child process begins at another place in the same script.

#include "helper.h"

#include <linux/sched.h>

int born_in_cgroup;
int keeper_pid;

// Structures that the kernel does not copy and that this code reads.
struct statx_start { // struct statx of linux/stat.h, up to the last member used
	uint32_t mask, blksize;
	uint64_t attributes;
	uint32_t nlink, uid, gid;
	uint16_t mode, spare;
	uint64_t ino, size, blocks, attributes_mask;
	uint64_t times[8];
	uint32_t rdev_major, rdev_minor, dev_major, dev_minor;
	uint64_t mnt_id;
};

static char *data(const struct script *s)
{
	return (char *)s + s->data;
}

static size_t data_size(const struct script *s)
{
	return s->size - s->data;
}

int relocate(struct script *s, size_t size)
{
	if (size < sizeof *s || s->size != size || s->data > size || s->data % 8 != 0)
		return 0;
	size_t room = data_size(s);
	if (s->calls == 0 || s->calls > (s->data - sizeof *s) / sizeof(struct call) || s->data < sizeof *s)
		return 0;
	// A string anywhere ends at the last byte at the latest.
	if (room == 0 || data(s)[room - 1] != 0)
		return 0;
	if (s->fixups % 4 != 0 || s->fixups > room || s->fixup_count > (room - s->fixups) / sizeof(uint32_t))
		return 0;
	const uint32_t *fixups = (const uint32_t *)(data(s) + s->fixups);
	for (uint32_t i = 0; i < s->fixup_count; i++) {
		if (fixups[i] % 8 != 0 || room < 8 || fixups[i] > room - 8)
			return 0;
		// A list of fixups that changes itself would escape these checks.
		if (fixups[i] + 8 > s->fixups && fixups[i] < s->fixups + s->fixup_count * sizeof(uint32_t))
			return 0;
		uint64_t *word = (uint64_t *)(data(s) + fixups[i]);
		if (*word >= room)
			return 0;
		*word += (uint64_t)(uintptr_t)data(s);
	}
	const struct call *calls = (const struct call *)(s + 1);
	for (uint32_t i = 0; i < s->calls; i++) {
		const struct call *c = &calls[i];
		if (c->step >= room || c->skip >= s->calls - i || c->over >= s->calls - i)
			return 0;
		for (int n = 0; n < 6; n++)
			if ((c->pointers & 1 << n && c->args[n] >= room) || (c->slots & 1 << n && c->args[n] >= SLOTS))
				return 0;
	}
	return 1;
}

const struct script *load(int fd, uintptr_t at)
{
	static const char step[] = "read a script";
	enum { SEEK_END = 2 };
	long size = must(step, SYS(lseek, fd, 0, SEEK_END, 0, 0));
	if (size > MAX_SCRIPT)
		fail(step, -E2BIG, 0);
	struct script *s = (struct script *)must(step, sys(__NR_mmap, (long)at, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | (at ? MAP_FIXED : 0), fd, 0));
	if (!relocate(s, (size_t)size))
		fail(step, -EINVAL, 0);
	return s;
}

// Whether size bytes at an address are in the script's data, aligned for any member of a structure.
static int within(const struct script *s, uint64_t at, size_t size)
{
	uint64_t start = (uint64_t)(uintptr_t)data(s);
	return at % 8 == 0 && at >= start && at - start <= data_size(s) && size <= data_size(s) - (at - start);
}

// Whether an array of pointers is in the script's data, with the null pointer at its end.
static int within_list(const struct script *s, uint64_t at)
{
	for (; within(s, at, sizeof(char *)); at += sizeof(char *))
		if (!*(char *const *)(uintptr_t)at)
			return 1;
	return 0;
}

// Whether there are slots for count descriptors, and a message can have them.
static int fit(uint64_t count, uint64_t first)
{
	return count <= MAX_RIGHTS && first < SLOTS && count <= SLOTS - first;
}

static void begin(void *arg)
{
	const struct beginning *b = arg;
	struct process p = {.place = b->parent->place};
	memcpy(p.slots, b->parent->slots, sizeof p.slots);
	run(&p, b->script, b->at);
}

// Forks a child that begins elsewhere in the script. The parent must not fork again.
static long fork_at(struct process *p, const struct script *s, uint64_t flags, uint32_t at)
{
	static char stacks[PLACES][STACK_SIZE] __attribute__((aligned(16)));
	p->child = (struct beginning){p, s, at};
	return clone_on(flags | SIGCHLD, stacks[p->place] + STACK_SIZE, begin, &p->child);
}

// Receives exactly count descriptors into slots.
static long receive_into(struct process *p, int socket, uint64_t count, uint64_t first)
{
	char byte;
	int got;
	long n = receive(socket, &byte, 1, 0, &p->rights, &got);
	if (failed(n))
		return n;
	if (n == 0)
		quit(0); // sbxrun is dead or has given up
	if (got != (int)count)
		return -EMFILE; // the kernel drops those for which there is no number
	for (uint64_t i = 0; i < count; i++)
		p->slots[first + i] = (uint64_t)p->rights.fds[i];
	return 0;
}

static long await_byte(int fd)
{
	char byte;
	long n;
	do
		n = SYS(read, fd, &byte, 1, 0, 0);
	while (n == -EINTR);
	if (n == 0)
		quit(0); // the writer is dead or has given up
	return n;
}

// Sends a report with the descriptors in count slots.
static long say_with(struct process *p, struct report *r, uint64_t count, uint64_t first)
{
	struct iovec iov = {r, sizeof *r};
	struct msghdr msg = {.iov = &iov, .iov_count = 1};
	if (count > 0) {
		p->rights.size = RIGHTS_HEADER + count * sizeof(int);
		p->rights.level = SOL_SOCKET;
		p->rights.type = SCM_RIGHTS;
		for (uint64_t i = 0; i < count; i++)
			p->rights.fds[i] = (int)p->slots[first + i];
		msg.control = &p->rights;
		msg.control_size = (p->rights.size + 7) & ~(size_t)7;
	}
	long n = SYS(sendmsg, report_fd, &msg, 0, 0, 0);
	return failed(n) ? n : 0;
}

static long operate(struct process *p, const struct script *s, const struct call *c, const uint64_t *a)
{
	const struct statx_start *x = (const struct statx_start *)(uintptr_t)a[0], *y = (const struct statx_start *)(uintptr_t)a[1];
	struct report r = {0};
	switch (c->number) {
	case OP_EXIT:
		quit((int)a[0]);
	case OP_SET:
	case OP_CHECK:
		return (long)a[0];
	case OP_FORK:
		return a[1] < s->calls ? fork_at(p, s, a[0], (uint32_t)a[1]) : -EINVAL;
	case OP_BECOME:
		return become(a[0] | SIGCHLD);
	case OP_PARENT:
		return SYS(getppid, 0, 0, 0, 0, 0) == keeper_pid ? 0 : -ESRCH;
	case OP_RECEIVE:
		return fit(a[1], a[2]) ? receive_into(p, (int)a[0], a[1], a[2]) : -EINVAL;
	case OP_AWAIT:
		return await_byte((int)a[0]);
	case OP_SAME_FILE:
		if (!within(s, a[0], sizeof *x))
			return -EINVAL;
		return x->dev_major == a[1] && x->dev_minor == a[2] && x->ino == a[3] ? 0 : -ESTALE;
	case OP_SAME_MOUNT:
		if (!within(s, a[0], sizeof *x) || !within(s, a[1], sizeof *y))
			return -EINVAL;
		return x->mnt_id == y->mnt_id ? 0 : -ESTALE;
	case OP_READY:
		if (!within(s, a[0], sizeof *x) || !fit(a[2], a[3]))
			return -EINVAL;
		r = (struct report){.kind = REPORT_READY, .value = (int64_t)x->ino, .number = (int64_t)a[1]};
		return say_with(p, &r, a[2], a[3]);
	case OP_SAY:
		if (!fit(a[1], a[2]))
			return -EINVAL;
		r.kind = (int64_t)a[0];
		return say_with(p, &r, a[1], a[2]);
	case OP_EXEC:
		if (!within_list(s, a[0]) || !within(s, a[1] - sizeof(char *), sizeof(char *)) || !within_list(s, a[1]) || !within_list(s, a[2]))
			return -EINVAL;
		return execute((char *const *)(uintptr_t)a[0], (char **)(uintptr_t)a[1], (char *const *)(uintptr_t)a[2]);
	case OP_INIT:
		be_init((int)a[0], (int)a[1], (int)a[2]);
	case OP_MAKE:
		if (a[1] >= s->calls)
			return -EINVAL;
		make(p, s, a[0], (uint32_t)a[1]);
	case OP_LOAD:
		take_command(p, (int)a[0]);
	}
	return -ENOSYS;
}

static int allows(const struct call *c, long error)
{
	for (int i = 0; i < 4; i++)
		if (c->allowed[i] == ANY_ERROR || (c->allowed[i] != 0 && c->allowed[i] == -error))
			return 1;
	return 0;
}

_Noreturn void run(struct process *p, const struct script *s, uint32_t at)
{
	const struct call *calls = (const struct call *)(s + 1);
	for (; at < s->calls; at++) {
		const struct call *c = &calls[at];
		if (c->unborn && born_in_cgroup)
			continue;
		uint64_t a[6];
		for (int n = 0; n < 6; n++) {
			a[n] = c->args[n];
			if (c->slots & 1 << n)
				a[n] = p->slots[a[n]];
			else if (c->pointers & 1 << n)
				a[n] += (uint64_t)(uintptr_t)data(s);
		}
		long r = c->number < 0 ? operate(p, s, c, a) : sys(c->number, (long)a[0], (long)a[1], (long)a[2], (long)a[3], (long)a[4], (long)a[5]);
		p->slots[c->result] = (uint64_t)r;
		if (!failed(r))
			at += c->over;
		else if (allows(c, r))
			at += c->skip;
		else
			fail(data(s) + c->step, r, c->mount);
	}
	quit(125);
}
