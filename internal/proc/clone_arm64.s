#include "textflag.h"

// func cloneCall(call, a, b, c, d, e, fn uintptr, arg unsafe.Pointer) uintptr
//
// The child comes back from the call with the same registers but R0 and SP. It
// calls fn as Go does (ABIInternal): the argument in R0.
TEXT ·cloneCall(SB), NOSPLIT|NOFRAME, $0-72
	MOVD call+0(FP), R8
	MOVD a+8(FP), R0
	MOVD b+16(FP), R1
	MOVD c+24(FP), R2
	MOVD d+32(FP), R3
	MOVD e+40(FP), R4
	MOVD fn+48(FP), R19
	MOVD arg+56(FP), R20
	SVC
	CBZ R0, child
	MOVD R0, ret+64(FP)
	RET
child:
	MOVD ZR, R29
	MOVD R20, R0
	CALL (R19)
	BRK
