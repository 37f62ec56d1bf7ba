#include "textflag.h"

// func cloneCall(call, a, b, c, d, e, fn uintptr, arg unsafe.Pointer) uintptr
//
// The child comes back from the call with the same registers but AX and SP. It
// calls fn as Go does (ABIInternal): the argument in AX, X15 zero.
TEXT ·cloneCall(SB), NOSPLIT|NOFRAME, $0-72
	MOVQ call+0(FP), AX
	MOVQ a+8(FP), DI
	MOVQ b+16(FP), SI
	MOVQ c+24(FP), DX
	MOVQ d+32(FP), R10
	MOVQ e+40(FP), R8
	MOVQ fn+48(FP), R12
	MOVQ arg+56(FP), R13
	SYSCALL
	TESTQ AX, AX
	JZ child
	MOVQ AX, ret+64(FP)
	RET
child:
	XORPS X15, X15
	XORL BP, BP
	MOVQ R13, AX
	CALL R12
	INT $3
