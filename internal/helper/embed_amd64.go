package helper

import _ "embed"

//go:embed helper_amd64
var program string

//go:embed hold_amd64
var holdProgram string
