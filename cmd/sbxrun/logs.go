package main

import (
	"context"
	"encoding/base64"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"strconv"
	"syscall"
	"unicode/utf8"

	"github.com/sbxrun/sbxrun/cleanup/result"
	"github.com/sbxrun/sbxrun/internal/cli"
	"github.com/sbxrun/sbxrun/internal/output"
	"github.com/sbxrun/sbxrun/internal/sandbox"
	"github.com/sbxrun/sbxrun/internal/state"
	"github.com/sbxrun/sbxrun/internal/stream"
	"github.com/sbxrun/sbxrun/internal/supervise"
)

func logsCommand(flags *cli.Logs) (r output.Result, err error) {
	tail := -1
	if flags.Tail != "" {
		if tail, err = strconv.Atoi(flags.Tail); err != nil || tail < 0 {
			return r, cli.UsageError(flags, fmt.Errorf("--tail %q: want a number of lines", flags.Tail))
		}
	}
	sandbox, err := find(flags.Sandbox)
	if err != nil {
		return r, err
	}
	l := reader{sandbox: sandbox, flags: flags, tail: tail}
	err = l.print()
	if stopped, ok := errors.AsType[supervise.Request](err); ok {
		return output.Result{Code: 128 + int(stopped.Signal)}, nil
	}
	return r, err
}

type reader struct {
	sandbox *state.Entry
	flags   *cli.Logs
	tail    int // lines; -1 for all
}

func (l *reader) print() error {
	ctx, cancel := context.WithCancelCause(context.Background())
	defer cancel(nil)
	over := make(chan struct{})
	if l.flags.Follow {
		got := make(chan os.Signal, 1)
		signal.Notify(got, syscall.SIGINT, syscall.SIGTERM, syscall.SIGHUP)
		go func() { cancel(supervise.Request{Cause: result.Canceled, Signal: (<-got).(syscall.Signal)}) }()
		go closeAtEnd(ctx, l.sandbox, over, cancel)
	} else {
		close(over) // print only existing output
	}
	var streams []stream.LogFile
	for _, s := range []struct {
		name, file string
		out        *os.File
	}{{"stdout", sandbox.Logs[0], os.Stdout}, {"stderr", sandbox.Logs[1], os.Stderr}} {
		if l.flags.Stream != "" && l.flags.Stream != s.name {
			continue
		}
		file, err := l.sandbox.OpenFile(s.file)
		if err != nil {
			return err
		}
		defer file.Close()
		if l.tail >= 0 {
			offset, err := stream.Tail(file, l.tail)
			if err == nil {
				_, err = file.Seek(offset, io.SeekStart)
			}
			if err != nil {
				return fmt.Errorf("%s: %w", s.file, err)
			}
		}
		emit := func(p []byte) error {
			_, err := s.out.Write(p)
			return output.Lost(err)
		}
		if l.flags.JSON {
			emit = func(p []byte) error { return output.JSON(output.Stdout, pieceOf(s.name, p)) }
		}
		streams = append(streams, stream.LogFile{File: file, Emit: emit})
	}
	if err := stream.Follow(ctx, over, streams...); err != nil {
		return err
	}
	l.noteCut()
	return nil
}

// piece is one line of logs --json: text, or base64 if it is not UTF-8.
type piece struct {
	Stream string  `json:"stream"`
	Text   *string `json:"text,omitempty"`
	Base64 *string `json:"base64,omitempty"`
}

func pieceOf(stream string, p []byte) piece {
	it := piece{Stream: stream}
	text := string(p)
	if utf8.ValidString(text) {
		it.Text = &text
	} else {
		text = base64.StdEncoding.EncodeToString(p)
		it.Base64 = &text
	}
	return it
}

// noteCut prints a note for each log that has only the first part of the output.
func (l *reader) noteCut() {
	if err := l.sandbox.Refresh(); err != nil {
		return // the record was removed after everything was printed
	}
	logs := l.sandbox.Record.Logs
	if logs == nil {
		return
	}
	for _, s := range []struct {
		name  string
		bytes int64
		cut   bool
	}{{"stdout", logs.StdoutBytes, logs.StdoutTruncated}, {"stderr", logs.StderrBytes, logs.StderrTruncated}} {
		if s.cut && (l.flags.Stream == "" || l.flags.Stream == s.name) {
			output.Note(fmt.Sprintf("%s is incomplete: the command wrote %d bytes or more, and only the first part was kept (--max-output)", s.name, s.bytes))
		}
	}
}
