package helper

import _ "embed"

//go:embed helper_amd64
var program string
