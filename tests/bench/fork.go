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
func forkCost([]*build) {
	var variants []variant
	for i, heap := range []string{"1024", "1"} {
		cmd := exec.CommandContext(ctx, self, forkServer, heap)
		cmd.Stderr = os.Stderr
		in, answers := piped(cmd)
		defer cmd.Wait() // ends with its stdin
		defer in.Close()
		variants = append(variants, variant{string('A' + rune(i)), "a heap of " + heap + " MiB", func() time.Duration {
			got(io.WriteString(in, "\n"))
			ns := got(strconv.ParseInt(strings.TrimSpace(got(answers.ReadString('\n'))), 10, 64))
			return time.Duration(ns) / forksPerRound
		}})
	}
	what := fmt.Sprintf("a keeper by a bare fork, until it is collected; each figure is the mean of %d", forksPerRound)
	took := compare("fork", what, rounds(20), 2, variants)
	for i, v := range variants {
		fmt.Printf("  %s  %.0f forks per second\n", v.letter, 1000/took[i].Quantile(0.5))
	}
	fmt.Println()
}

// serveForks answers every line of stdin with the time for forking idle keepers, one after
// another, until each was reaped.
func serveForks(heap string) {
	memory := make([][]byte, got(strconv.Atoi(heap)))
	for i := range memory {
		memory[i] = make([]byte, 1<<20)
		for at := 0; at < len(memory[i]); at += 4096 {
			memory[i][at] = 1 // a page counts when it is touched
		}
	}
	runtime.GC() // so that none runs during a measurement
	for in := bufio.NewReader(os.Stdin); ; {
		if _, err := in.ReadString('\n'); err != nil {
			return
		}
		begin := time.Now()
		for range forksPerRound {
			forkOne()
		}
		fmt.Println(time.Since(begin).Nanoseconds())
		runtime.KeepAlive(memory)
	}
}

func forkOne() {
	k := got(proc.Keep(proc.Command{}))
	deadline := time.Now().Add(time.Minute)
	got(k.Empty(deadline))
	must(k.Reap(deadline))
}
