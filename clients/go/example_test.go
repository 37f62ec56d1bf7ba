package sbxrun_test

import (
	"context"
	"fmt"
	"log"
	"os"
	"time"

	sbxrun "github.com/sbxrun/sbxrun/clients/go"
)

func Example() {
	ctx := context.Background()
	client, err := sbxrun.New("unix:/run/sbxrund.sock") // or http://127.0.0.1:8080, with a Token
	if err != nil {
		log.Fatal(err)
	}
	report, err := client.Run(ctx, sbxrun.Call{Code: "print(6*7)", Timeout: 5 * time.Second})
	if err != nil {
		log.Fatal(err) // a *Refused, *Unproven or *Lost
	}
	fmt.Println(report.Cause, report.ExitCode, report.Stdout)

	for event, err := range client.Stream(ctx, sbxrun.Call{Argv: []string{"sh", "-c", "echo a; sleep 1; echo b"}}) {
		if err != nil {
			log.Fatal(err)
		}
		os.Stdout.Write(event.Data)
	}
}
