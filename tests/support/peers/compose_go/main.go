// Command compose reads a Compose file with the parser of `docker compose`, and prints the project
// that it describes.
package main

import (
	"context"
	"log"
	"os"

	"github.com/compose-spec/compose-go/v2/cli"
)

func check(err error) {
	if err != nil {
		log.Fatal(err)
	}
}

func main() {
	options, err := cli.NewProjectOptions(os.Args[1:])
	check(err)
	project, err := options.LoadProject(context.Background())
	check(err)
	text, err := project.MarshalYAML()
	check(err)
	_, err = os.Stdout.Write(text)
	check(err)
}
