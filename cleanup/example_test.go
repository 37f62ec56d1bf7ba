package cleanup_test

import (
	"fmt"
	"log"
	"os"

	"github.com/sbxrun/sbxrun/cleanup"
)

func ExampleSweep() {
	dir, err := os.MkdirTemp("", "example") // "" means the caller's own
	if err != nil {
		log.Fatal(err)
	}
	defer os.RemoveAll(dir)
	found, err := cleanup.Sweep(cleanup.Options{StateDir: dir, Quick: true})
	if err != nil {
		log.Fatal(err)
	}
	for _, f := range found {
		fmt.Println(f.Kind, f.What, f.Done)
	}
	fmt.Println(len(found), "things were left")
	// Output: 0 things were left
}
