package helper

import _ "embed"

//go:embed helper_arm64
var program string
