#include "go_asm.h"
#include "textflag.h"

// The registers of a system call: its number in AX, its arguments in DI, SI, DX and R10. It changes
// AX, CX and R11.
#define READ        $0
#define WRITE       $1
#define SIGPROCMASK $14
#define EXECVE      $59
#define FCNTL       $72
#define EXIT        $231

// func launch()
//
// BX    the argument in hand, first the word, then the paths
// R12   environment
// R13   arguments of the command
// R14   the error to report, negative
TEXT ·launch(SB), NOSPLIT|NOFRAME|TOPFRAME, $0-0
	MOVQ 0(SP), AX
	LEAQ 8(SP), BX
	LEAQ 16(SP)(AX*8), R12
	MOVQ (BX), AX
	MOVL (AX), R13
	CMPL R13, $const_launchWait
	JEQ ours
	CMPL R13, $const_launchNow
	JNE refuse

ours:
	// Only a successful exec closes the gate, and with it confirms.
	MOVL $const_entrySocket, DI
	MOVL $2, SI // F_SETFD
	MOVL $1, DX // FD_CLOEXEC
	MOVL FCNTL, AX
	SYSCALL
	MOVL $const_entryGate, DI
	MOVL FCNTL, AX
	SYSCALL
	CMPL R13, $const_launchWait
	JNE released

wait:
	MOVL $const_entryGate, DI
	LEAQ -8(SP), SI
	MOVL $1, DX
	MOVL READ, AX
	SYSCALL
	CMPQ AX, $-4 // EINTR
	JEQ wait
	CMPQ AX, $1
	JEQ released
	XORL DI, DI // end-of-file: sbxrun died or gave up before the release
	JMP exit

released:
	// Until here nothing but SIGKILL can end us.
	MOVL $2, DI // SIG_SETMASK
	MOVQ $0, -8(SP)
	LEAQ -8(SP), SI
	XORL DX, DX
	MOVL $8, R10
	MOVL SIGPROCMASK, AX
	SYSCALL

	MOVQ BX, R13

find:
	ADDQ $8, R13
	MOVQ (R13), AX
	CMPB (AX), $0
	JNE find
	ADDQ $8, R13
	MOVQ $-2, R14 // ENOENT

next:
	ADDQ $8, BX
	MOVQ (BX), DI
	CMPB (DI), $0
	JEQ fail
	MOVQ R13, SI
	MOVQ R12, DX
	MOVL EXECVE, AX
	SYSCALL
	CMPQ AX, $-8 // ENOEXEC
	JNE failed

	// A script without an interpreter line: /bin/sh PATH and the other arguments.
	MOVQ -8(R13), R8
	MOVQ (R13), R9
	MOVQ (BX), AX
	MOVQ AX, (R13)
	MOVQ $const_shellAt, DI
	MOVQ DI, -8(R13)
	LEAQ -8(R13), SI
	MOVQ R12, DX
	MOVL EXECVE, AX
	SYSCALL
	MOVQ R8, -8(R13)
	MOVQ R9, (R13)

failed:
	CMPQ AX, $-2 // ENOENT
	JEQ next
	CMPQ AX, $-20 // ENOTDIR
	JEQ next
	MOVQ AX, R14
	CMPQ AX, $-13 // EACCES
	JEQ next

fail:
	LEAQ -message__size(SP), SI
	MOVL $(message__size/8), CX
	MOVQ SI, DI
	XORL AX, AX
	CLD
	REP
	STOSQ
	NEGQ R14
	MOVQ $const_messageFailed, message_kind(SI)
	MOVQ $const_stepExec, message_step(SI)
	MOVQ R14, message_value(SI)
	MOVL $const_entrySocket, DI
	MOVL $message__size, DX
	MOVL WRITE, AX
	SYSCALL
	MOVL $125, DI

exit:
	MOVL EXIT, AX
	SYSCALL
	JMP exit

refuse:
	MOVL $2, DI
	MOVQ $const_refusalAt, SI
	MOVL $const_refusalSize, DX
	MOVL WRITE, AX
	SYSCALL
	MOVL $126, DI
	JMP exit
	LONG $const_launchEnd
	LONG $const_launchEnd

// func launchCode() unsafe.Pointer
TEXT ·launchCode(SB), NOSPLIT|NOFRAME, $0-8
	LEAQ ·launch(SB), AX
	MOVQ AX, ret+0(FP)
	RET
