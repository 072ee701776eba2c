package membership

// claims are what a speaker owns and keeps, as its plan has it: what they mean
// is nothing to the membership. They travel with the news that the speaker is
// alive and ready: whoever knows that one knows them, and their order is
// memberlist's.
type claims [128]byte

// Claim tells all speakers what this one owns and keeps; see plan.Claims. They
// count here at once, and elsewhere some ten milliseconds later.
func (t *Task) Claim(buckets [128]byte) {
	if t.setClaims(t.options.Node, buckets) {
		wake(t.tell)
	}
}

// setClaims records a speaker's claims and reports whether they are news.
func (t *Task) setClaims(node string, c claims) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.claims[node] == c {
		return false
	}
	t.claims[node] = c
	if c == (claims{}) {
		delete(t.claims, node)
	}
	t.changed.Notify()
	return true
}
