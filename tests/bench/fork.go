package main

import (
	"bufio"
	"fmt"
	"io"
	"os"
	"os/exec"
	"runtime"
	"strconv"
	"strings"
	"time"

	"github.com/sbxrun/sbxrun/internal/proc"
)

// forkServer, as the first argument, turns the benchmark into a program that only forks keepers.
// The second argument is the size of its heap in MiB.
const forkServer = "fork-server"

// forksPerRound is the number of forks per measurement.
const forksPerRound = 200

// forkCost compares forks of a keeper by a program with a large heap and by one with a small heap.
func forkCost([]*build) error {
	var variants []variant
	for i, heap := range []string{"1024", "1"} {
		cmd := exec.CommandContext(ctx, self, forkServer, heap)
		cmd.Stderr = os.Stderr
		in, answers, err := piped(cmd)
		if err != nil {
			return err
		}
		defer cmd.Wait() // ends with its stdin
		defer in.Close()
		variants = append(variants, variant{string('A' + rune(i)), "a heap of " + heap + " MiB", func() (time.Duration, error) {
			if _, err := io.WriteString(in, "\n"); err != nil {
				return 0, err
			}
			line, err := answers.ReadString('\n')
			if err != nil {
				return 0, err
			}
			ns, err := strconv.ParseInt(strings.TrimSpace(line), 10, 64)
			return time.Duration(ns) / forksPerRound, err
		}})
	}
	what := fmt.Sprintf("a keeper by a bare fork, until it is collected; each figure is the mean of %d", forksPerRound)
	took, err := compare("fork", what, rounds(20), 2, variants)
	if err != nil {
		return err
	}
	for i, v := range variants {
		fmt.Printf("  %s  %.0f forks per second\n", v.letter, 1000/took[i].Quantile(0.5))
	}
	fmt.Println()
	return nil
}

// serveForks answers every line of stdin with the time for forking idle keepers, one after
// another, until each was reaped.
func serveForks(heap string) error {
	mib, err := strconv.Atoi(heap)
	if err != nil {
		return err
	}
	memory := make([][]byte, mib)
	for i := range memory {
		memory[i] = make([]byte, 1<<20)
		for at := 0; at < len(memory[i]); at += 4096 {
			memory[i][at] = 1 // a page counts when it is touched
		}
	}
	runtime.GC() // so that none runs during a measurement
	for in := bufio.NewReader(os.Stdin); ; {
		if _, err := in.ReadString('\n'); err != nil {
			return nil
		}
		begin := time.Now()
		for range forksPerRound {
			if err := forkOne(); err != nil {
				return err
			}
		}
		fmt.Println(time.Since(begin).Nanoseconds())
		runtime.KeepAlive(memory)
	}
}

func forkOne() error {
	k, err := proc.Keep(proc.Command{})
	if err != nil {
		return err
	}
	deadline := time.Now().Add(time.Minute)
	if _, err := k.Empty(deadline); err != nil {
		return err
	}
	return k.Reap(deadline)
}
