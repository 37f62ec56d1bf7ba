package harness

import _ "github.com/sbxrun/sbxrun/internal/arch" // fails the build except on amd64 and arm64
