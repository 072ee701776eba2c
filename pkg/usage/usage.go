// Package usage has what is wrong with a command line in words for people: what was written, what is possible
// instead, and where the help is.
package usage

import (
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	"k8s.io/apimachinery/pkg/util/validation"

	"github.com/lodestone-lb/lodestone/pkg/config"
)

// values are what flags take, by the name of their type. The parsers of these have Go's terms in their errors.
var values = map[string]string{
	"bool":     "true or false",
	"duration": "a time with its unit, such as 30s or 1m30s",
	"uint16":   "a number from 0 to 65535",
	"int":      "a whole number",
	"int32":    "a whole number",
	"float32":  "a number",
}

// FlagError returns what is wrong with a flag. It is for cobra's SetFlagErrorFunc.
func FlagError(cmd *cobra.Command, err error) error {
	return fmt.Errorf("%w: see %s --help", explained(cmd, err), cmd.CommandPath())
}

func explained(cmd *cobra.Command, err error) error {
	var unknown *pflag.NotExistError
	var invalid *pflag.InvalidValueError
	switch {
	case errors.As(err, &unknown) && unknown.GetSpecifiedShortnames() == "":
		var names []string
		cmd.Flags().VisitAll(func(f *pflag.Flag) { names = append(names, f.Name) })
		if near := config.Nearest(unknown.GetSpecifiedName(), names); near != "" {
			return fmt.Errorf("%w, did you mean --%s?", err, near)
		}
	case errors.As(err, &invalid):
		if takes := values[invalid.GetFlag().Value.Type()]; takes != "" {
			return fmt.Errorf("--%s is %q, not %s", invalid.GetFlag().Name, invalid.GetValue(), takes)
		}
	}
	return err
}

// Args accepts from least to most arguments. If the command has others, an argument is a command that it lacks.
func Args(least, most int) cobra.PositionalArgs {
	return func(cmd *cobra.Command, args []string) error {
		see := ": see " + cmd.CommandPath() + " --help"
		switch {
		case least <= len(args) && len(args) <= most:
			return nil
		case cmd.HasSubCommands():
			return fmt.Errorf("unknown command %q for %q%s%s", args[0], cmd.CommandPath(), meant(cmd, args[0]), see)
		case most == 0:
			return fmt.Errorf("%s takes no argument, and %q is one%s", cmd.CommandPath(), args[0], see)
		}
		return fmt.Errorf("%d arguments given, and the command is %s%s", len(args), strings.TrimSuffix(cmd.UseLine(), " [flags]"), see)
	}
}

// meant is a question for the command that somebody probably meant.
func meant(cmd *cobra.Command, typed string) string {
	var names []string
	for _, c := range cmd.Commands() {
		if c.IsAvailableCommand() {
			names = append(names, c.Name())
		}
	}
	if near := config.Nearest(typed, names); near != "" {
		return ", did you mean " + near + "?"
	}
	return ""
}

// Name refuses what is not the name of an object in Kubernetes. The flag is named as people write it.
func Name(flag, value string) error {
	if len(validation.IsDNS1123Subdomain(value)) > 0 {
		return fmt.Errorf("%s is %q, not a name in Kubernetes, of a-z, 0-9, '-' and '.'", flag, value)
	}
	return nil
}

// Classes refuses classes of Services that nothing is served by.
func Classes(classless bool, classes []string) error {
	switch {
	case slices.Contains(classes, ""):
		return fmt.Errorf("--load-balancer-classes is %q: one of the classes is empty, leave it out", strings.Join(classes, ","))
	case !classless && len(classes) == 0:
		return errors.New("--handle-classless=false and no class in --load-balancer-classes: no Service at all would be served, " +
			"change one of them")
	}
	return nil
}
