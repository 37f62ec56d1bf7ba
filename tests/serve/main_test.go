// Package serve tests the built server from outside, over its sockets.
package serve

import (
	"testing"

	"github.com/sbxrun/sbxrun/tests/harness"
)

func TestMain(m *testing.M) { harness.Main(m) }
