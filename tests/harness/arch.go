package harness

import _ "github.com/sbxrun/sbxrun/internal/arch" // stops the build on other architectures than amd64 and arm64
