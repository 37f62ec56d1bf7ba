// Package state keeps what is known of sandboxes in files, so that commands find
// those that other processes supervise, without a daemon.
//
//	STATE/lock            held while a sandbox is made or removed, or a name taken over
//	STATE/names/NAME      a symbolic link whose text is the id; it is read, never followed
//	STATE/ID/lock         held by the supervisor as long as it lives
//	STATE/ID/activity     held, shared, by every exec in the sandbox; see [Own.EndIfIdle]
//	STATE/ID/record.json  [Record]
//	STATE/ID/kill.json    [Kill], a request to the supervisor
//	STATE/ID/ending       is there from when the supervisor has begun to end the sandbox
//	STATE/ID/access       [Access], as long as the sandbox can be entered
//	STATE/ID/...          what the supervisor adds: the logs
//	STATE/queue           waited for by who wants a slot; see [Dir.WaitSlot]
//	STATE/slot-N          held by a command of --max-parallel as long as it runs
//	STATE/admission       held while a command starts that may be too much; see [Dir.TryAdmission]
//	STATE/.ID             a sandbox's directory that is being made or removed
//
// The state directory is its owner's alone (0700), so whatever lies in it was put
// there by the same user or by root. All the same nothing in it is trusted: no
// symbolic link is followed, only regular files are opened, reads are bounded,
// and a record names processes by [proc.Identity], which is compared before
// anything is signalled. Paths are looked up once; all else is relative to
// descriptors, so what becomes of the path afterwards does not matter.
//
// Who lives. The supervisor holds ID/lock, and the kernel gives it up when the
// supervisor dies. The lock is taken before the directory gets its name, and never
// again: the id is not used twice. So whoever sees ID and finds the lock free has
// seen the sandbox's end, for good, and needs no lock of his own to act on it. The
// locks are those of open file descriptions (fcntl_locking(2), F_OFD_SETLK,
// Linux 3.15) because these can be asked after without being taken: a ps that
// looks is never mistaken for a supervisor, nor a sandbox for a living one
// because somebody looks.
//
// Half-made directories. A process can be killed between mkdir(2) and taking the
// lock, and who cleans up must not take one who is about to lock for one who was
// killed. So a directory is made as .ID under STATE/lock and renamed when it is
// complete: whoever has STATE/lock and sees a .ID sees something that was left.
//
// Names. symlink(2) is atomic and decides who gets a name. A link to a sandbox that
// does not live any more is replaced, under STATE/lock, since two who both find it
// dead must not both remove what the other has put there.
//
// Nothing is synced to disk: a crash of the machine ends the sandboxes too, and a
// record of another boot is never acted upon.
package state
