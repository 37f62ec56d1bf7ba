package helper

import _ "embed"

//go:embed helper_arm64
var program string

//go:embed hold_arm64
var holdProgram string
