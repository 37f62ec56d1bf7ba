package helper

import _ "github.com/sbxrun/sbxrun/internal/arch" // stops the build elsewhere than on amd64 and arm64
