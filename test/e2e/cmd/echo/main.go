// Command echo runs in the lab's pods. Its answers name the pod.
package main

import (
	"context"
	"flag"
	"log"
	"os"
	"os/signal"
	"syscall"
	"time"

	"github.com/lodestone-lb/lodestone/test/e2e/echo"
)

func main() {
	pod, err := os.Hostname() // Kubernetes names it after the pod
	if err != nil {
		log.Fatal(err)
	}
	server := &echo.Server{Pod: pod, Node: os.Getenv("NODE_NAME")}
	flag.IntVar(&server.Port, "port", 8080, "TCP and UDP port")
	flag.StringVar((*string)(&server.Termination), "on-term", string(echo.Exit), "what SIGTERM does: exit, drain or ignore")
	flag.DurationVar(&server.Grace, "grace", 5*time.Second, "how long to serve on with -on-term=drain")
	flag.Parse()

	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	if err = server.Run(ctx); err != nil {
		log.Fatal(err)
	}
}
