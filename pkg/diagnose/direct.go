package diagnose

import "fmt"

// unreachable are the states in which connections are not handed to a node, and what follows.
// A node that is not heard of yet may come.
var unreachable = []struct{ state, follows string }{
	{"silent", "do not answer, and their connections wait"},
	{"gone", "have not answered for long, and their connections are reset"},
	{"elsewhere", "are handed no connections, since they are not on a segment of this node, or this node has no address with the " +
		"segment's prefix length (only a /32 or /128), or they have a router's hardware address"},
}

func forwards(c *Cluster) (all []Finding) {
	for name, facts := range c.nodes() {
		f := facts.Forwarding
		if f == nil {
			continue // an older speaker
		}
		if f.Error != "" {
			all = append(all, found(Warning, name, "the log of the node's speaker has a hint",
				"direct forwarding is not up to date, and its VIPs work without: %s", f.Error))
		}
		if f.WithoutTable > 0 {
			all = append(all, found(Warning, name, "use direct forwarding for fewer Services of policy Local",
				"%d Services at VIPs work without direct forwarding: there are too many different sets of backends", f.WithoutTable))
		}
		if f.ConntrackFull {
			all = append(all, found(Warning, name, "raise net.netfilter.nf_conntrack_max, or find out who opens so many connections",
				"conntrack is nearly full: when it is, this node takes no new connections"))
		}
		for _, why := range unreachable {
			var who []string
			for _, u := range f.Unreachable {
				if u.State == why.state {
					who = append(who, fmt.Sprintf("%s (%s)", u.Node, u.Address))
				}
			}
			if len(who) > 0 {
				all = append(all, found(Warning, name, "lodestone explain vip ADDRESS shows who is handed connections",
					"these nodes %s: %s", why.follows, list(who)))
			}
		}
	}
	return all
}
