package seccomp

// allowed are the calls that the filter allows with all arguments, by the reason. Each call is in table or here, so that
// a new one is reviewed: see newest.
var allowed = map[string]string{
	"the kernel wants CAP_SYS_ADMIN, which no payload has; the init of a warm room, made below the same filter, has it and mounts": "mount umount umount2 pivot_root move_mount open_tree open_tree_attr fsopen fsconfig fsmount fspick mount_setattr",
	"the kernel wants another capability": "chroot sethostname setdomainname settimeofday stime clock_settime clock_settime64 adjtimex clock_adjtime clock_adjtime64 " +
		"pciconfig_iobase pciconfig_read pciconfig_write set_mempolicy_home_node",
	"about the caller's own mount namespace, in the place of /proc/self/mountinfo": "statmount listmount",
	"attributes of its own files; an inode flag or a project ID reaches nobody else, and neither can set S_ISUID": "file_getattr file_setattr setxattrat getxattrat listxattrat removexattrat setxattr lsetxattr fsetxattr getxattr " +
		"lgetxattr fgetxattr listxattr llistxattr flistxattr removexattr lremovexattr fremovexattr",
	"the caller narrows its own rights; browsers, man(1) and OpenSSH do": "seccomp landlock_create_ruleset landlock_add_rule landlock_restrict_self lsm_get_self_attr lsm_set_self_attr " +
		"lsm_list_modules",
	"a handle without open_by_handle_at(2) is a number; marks need a descriptor of fanotify_init(2)": "name_to_handle_at fanotify_mark",
	"other processes: the PID namespace and the rules of ptrace(2) bound them": "kcmp pidfd_open pidfd_getfd pidfd_send_signal process_vm_readv process_vm_writev process_madvise process_mrelease " +
		"migrate_pages move_pages",
	"trampolines of the host's uprobes, which kill a process that makes them otherwise": "uprobe uretprobe",
	"setarch -R, for debuggers and sanitizers":                                          "personality",
	"databases; fs.aio-max-nr bounds them for the machine":                              "io_setup io_submit io_cancel io_destroy io_getevents io_pgetevents io_pgetevents_time64",
	"the kernel has none of them any more": "_sysctl afs_syscall arch_specific_syscall bdflush break create_module epoll_ctl_old epoll_wait_old ftime get_kernel_syms " +
		"getpmsg gtty idle lock mpx prof profil putpmsg query_module security stty syscall_mask tuxcall ulimit vserver",
	"recent, for memory, locks and threads of the caller's own": "map_shadow_stack mseal futex_wait futex_wake futex_requeue futex_waitv rseq rseq_slice_yield pkey_alloc pkey_free " +
		"pkey_mprotect memfd_create membarrier",
	"ordinary": "_llseek _newselect accept accept4 access alarm arch_prctl arm_fadvise64_64 arm_sync_file_range bind brk capget capset " +
		"chdir chown chown32 clock_getres clock_getres_time64 clock_gettime clock_gettime64 clock_nanosleep " +
		"clock_nanosleep_time64 close close_range connect copy_file_range dup dup2 dup3 epoll_create epoll_create1 epoll_ctl " +
		"epoll_pwait epoll_pwait2 epoll_wait eventfd eventfd2 execve execveat exit exit_group faccessat faccessat2 fadvise64 " +
		"fadvise64_64 fallocate fchdir fchown fchown32 fchownat fdatasync flock fork fstat fstat64 fstatat64 fstatfs fstatfs64 " +
		"fsync ftruncate ftruncate64 futex futex_time64 futimesat get_mempolicy get_robust_list get_thread_area getcpu getcwd " +
		"getdents getdents64 getegid getegid32 geteuid geteuid32 getgid getgid32 getgroups getgroups32 getitimer getpeername " +
		"getpgid getpgrp getpid getppid getpriority getrandom getresgid getresgid32 getresuid getresuid32 getrlimit getrusage " +
		"getsid getsockname getsockopt gettid gettimeofday getuid getuid32 inotify_add_watch inotify_init inotify_init1 " +
		"inotify_rm_watch ioprio_get ioprio_set ipc kill lchown lchown32 link linkat listen lseek lstat lstat64 madvise mbind " +
		"mincore mkdir mkdirat mlock mlock2 mlockall mmap mmap2 mprotect mq_getsetattr mq_notify mq_open mq_timedreceive " +
		"mq_timedreceive_time64 mq_timedsend mq_timedsend_time64 mq_unlink mremap msgctl msgget msgrcv msgsnd msync munlock " +
		"munlockall munmap nanosleep newfstatat nice oldfstat oldlstat oldolduname oldstat olduname pause pipe pipe2 poll ppoll " +
		"ppoll_time64 prctl pread64 preadv preadv2 pselect6 pselect6_time64 pwrite64 pwritev pwritev2 read readahead readdir " +
		"readlink readlinkat readv recv recvfrom recvmmsg recvmmsg_time64 recvmsg remap_file_pages rename renameat renameat2 " +
		"restart_syscall rmdir rt_sigaction rt_sigpending rt_sigprocmask rt_sigqueueinfo rt_sigreturn rt_sigsuspend " +
		"rt_sigtimedwait rt_sigtimedwait_time64 rt_tgsigqueueinfo sched_get_priority_max sched_get_priority_min sched_getaffinity " +
		"sched_getattr sched_getparam sched_getscheduler sched_rr_get_interval sched_rr_get_interval_time64 sched_yield select " +
		"semctl semget semop semtimedop semtimedop_time64 sendfile sendfile64 set_mempolicy set_robust_list set_thread_area " +
		"set_tid_address setfsgid setfsgid32 setfsuid setfsuid32 setgid setgid32 setgroups setgroups32 setitimer setpgid setregid " +
		"setregid32 setresgid setresgid32 setresuid setresuid32 setreuid setreuid32 setsid setuid setuid32 sgetmask shmat shmctl " +
		"shmdt shmget shutdown sigaction sigaltstack signal signalfd signalfd4 sigpending sigprocmask sigreturn sigsuspend splice " +
		"ssetmask stat stat64 statfs statfs64 statx symlink symlinkat sync_file_range sysfs sysinfo tee tgkill time timer_create " +
		"timer_delete timer_getoverrun timer_gettime timer_gettime64 timer_settime timer_settime64 timerfd_create timerfd_gettime " +
		"timerfd_gettime64 timerfd_settime timerfd_settime64 times tkill truncate truncate64 ugetrlimit umask uname unlink " +
		"unlinkat ustat utime utimensat utimensat_time64 utimes vfork vmsplice wait4 waitid waitpid write writev",
}
