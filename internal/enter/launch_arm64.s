#include "go_asm.h"
#include "textflag.h"

// The registers of a system call: its number in R8, its arguments from R0 on. It changes R0.
#define FCNTL       $25
#define READ        $63
#define WRITE       $64
#define EXIT        $94
#define SIGPROCMASK $135
#define EXECVE      $221

// func launch()
//
// R19   the argument in hand, first the word, then the paths
// R20   environment
// R21   arguments of the command
// R22   the error to report, negative
TEXT ·launch(SB), NOSPLIT|NOFRAME|TOPFRAME, $0-0
	MOVD RSP, R9
	MOVD (R9), R0
	ADD $8, R9, R19
	ADD R0<<3, R19, R20
	ADD $8, R20
	SUB $message__size, R9, R23
	AND $~15, R23
	MOVD (R19), R0
	MOVWU (R0), R21
	MOVD $const_launchWait, R1
	CMP R1, R21
	BEQ ours
	MOVD $const_launchNow, R2
	CMP R2, R21
	BNE refuse

ours:
	// Only a successful exec closes the gate, and with it confirms.
	MOVD $const_entrySocket, R0
	MOVD $2, R1 // F_SETFD
	MOVD $1, R2 // FD_CLOEXEC
	MOVD FCNTL, R8
	SVC
	MOVD $const_entryGate, R0
	SVC
	MOVD $const_launchWait, R1
	CMP R1, R21
	BNE released

wait:
	MOVD $const_entryGate, R0
	MOVD R23, R1
	MOVD $1, R2
	MOVD READ, R8
	SVC
	CMN $4, R0 // EINTR
	BEQ wait
	CMP $1, R0
	BEQ released
	MOVD $0, R0 // end-of-file: sbxrun died or gave up before the release
	B exit

released:
	// Until here nothing but SIGKILL can end us.
	MOVD $2, R0 // SIG_SETMASK
	MOVD ZR, (R23)
	MOVD R23, R1
	MOVD $0, R2
	MOVD $8, R3
	MOVD SIGPROCMASK, R8
	SVC

	MOVD R19, R21

find:
	ADD $8, R21
	MOVD (R21), R0
	MOVBU (R0), R0
	CBNZ R0, find
	ADD $8, R21
	MOVD $-2, R22 // ENOENT

next:
	ADD $8, R19
	MOVD (R19), R0
	MOVBU (R0), R1
	CBZ R1, fail
	MOVD R21, R1
	MOVD R20, R2
	MOVD EXECVE, R8
	SVC
	CMN $8, R0 // ENOEXEC
	BNE failed

	// A script without an interpreter line: /bin/sh PATH and the other arguments.
	MOVD -8(R21), R9
	MOVD (R21), R10
	MOVD (R19), R0
	MOVD R0, (R21)
	MOVD $const_shellAt, R0
	MOVD R0, -8(R21)
	SUB $8, R21, R1
	MOVD R20, R2
	SVC
	MOVD R9, -8(R21)
	MOVD R10, (R21)

failed:
	CMN $2, R0 // ENOENT
	BEQ next
	CMN $20, R0 // ENOTDIR
	BEQ next
	MOVD R0, R22
	CMN $13, R0 // EACCES
	BEQ next

fail:
	MOVD R23, R1
	MOVD $message__size, R2
	ADD R1, R2, R3

clear:
	SUB $8, R3
	MOVD ZR, (R3)
	CMP R1, R3
	BNE clear
	NEG R22, R22
	MOVD $const_messageFailed, R0
	MOVD R0, message_kind(R1)
	MOVD $const_stepExec, R0
	MOVD R0, message_step(R1)
	MOVD R22, message_value(R1)
	MOVD $const_entrySocket, R0
	MOVD WRITE, R8
	SVC
	MOVD $125, R0

exit:
	MOVD EXIT, R8
	SVC
	B exit

refuse:
	MOVD $2, R0
	MOVD $const_refusalAt, R1
	MOVD $const_refusalSize, R2
	MOVD WRITE, R8
	SVC
	MOVD $126, R0
	B exit
	WORD $const_launchEnd
	WORD $const_launchEnd

// func launchCode() unsafe.Pointer
TEXT ·launchCode(SB), NOSPLIT|NOFRAME, $0-8
	MOVD $·launch(SB), R0
	MOVD R0, ret+0(FP)
	RET
