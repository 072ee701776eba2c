package dashboard

import (
	"embed"
	"encoding/json"
	"fmt"
	"html/template"
	"net/http"
	"strings"
	"time"
)

// Path is where Handler is to be served. Whoever may read below it may see the dashboard.
const Path = "/dashboard"

const (
	// streamLife is how long a page is sent changes before it has to ask
	// again: a right that was taken away ends by then.
	streamLife = 10 * time.Minute
	// beat is the time between signs of life. writeTimeout is how long a page may take to receive what it is
	// sent.
	beat         = 15 * time.Second
	writeTimeout = 10 * time.Second
	// firstLook is how long the first look at a cluster may take.
	firstLook = 30 * time.Second
)

// policy forbids the page everything but its own scripts, styles, images and streams.
const policy = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; base-uri 'none'; " +
	"form-action 'none'; frame-ancestors 'none'"

//go:embed page
var files embed.FS

var shell = template.Must(template.ParseFS(files, "page/index.html"))

// Handler serves the page and what the page loads. It authenticates nobody: put it behind something that does.
func (d *Dashboard) Handler() http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("GET "+Path, func(w http.ResponseWriter, r *http.Request) {
		http.Redirect(w, r, Path+"/", http.StatusMovedPermanently)
	})
	mux.HandleFunc("GET "+Path+"/{$}", d.page)
	for name, kind := range map[string]string{"dashboard.css": "text/css", "dashboard.js": "text/javascript", "icon.svg": "image/svg+xml"} {
		content, err := files.ReadFile("page/" + name)
		if err != nil {
			panic(err) // it is embedded
		}
		mux.HandleFunc("GET "+Path+"/"+name, func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Content-Type", kind+"; charset=utf-8")
			w.Write(content) //nolint:errcheck // the reader has gone
		})
	}
	mux.HandleFunc("GET "+Path+"/view", d.view)
	mux.HandleFunc("GET "+Path+"/events", d.events)
	return guarded(mux)
}

// guarded sets the headers that keep a browser from doing more with the page than
// showing it.
func guarded(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		h := w.Header()
		h.Set("Content-Security-Policy", policy)
		h.Set("X-Content-Type-Options", "nosniff")
		h.Set("Referrer-Policy", "no-referrer")
		h.Set("Cross-Origin-Resource-Policy", "same-origin")
		h.Set("Cross-Origin-Opener-Policy", "same-origin")
		h.Set("Cache-Control", "no-store")
		next.ServeHTTP(w, r)
	})
}

func (d *Dashboard) page(w http.ResponseWriter, _ *http.Request) {
	w.Header().Set("Content-Type", "text/html; charset=utf-8")
	if err := shell.Execute(w, map[string]string{"Version": d.Version}); err != nil {
		d.Log.Debug("page not sent", "err", err)
	}
}

// view answers with the whole View of a Query, once.
func (d *Dashboard) view(w http.ResponseWriter, r *http.Request) {
	if !d.admit(w) {
		return
	}
	defer d.leave()
	late := time.After(firstLook)
	for {
		changed := d.changed.Next()
		if s, past := d.current(); s != nil {
			sections, _ := NewView(s, past, ParseQuery(r.URL.Query())).since(nil)
			w.Header().Set("Content-Type", "application/json")
			text, _ := json.Marshal(update{s.Time, sections})                  // NewView would have panicked
			stream{w, http.NewResponseController(w)}.send(string(text) + "\n") //nolint:errcheck // the reader has gone
			return
		}
		select {
		case <-changed:
		case <-late:
			http.Error(w, "the cluster could not be read in time: does the API server answer?", http.StatusServiceUnavailable)
			return
		case <-r.Context().Done():
			return
		case <-d.stopped:
			http.Error(w, "the controller ends", http.StatusServiceUnavailable)
			return
		}
	}
}

// admit lets a visitor in, or answers that there are too many.
func (d *Dashboard) admit(w http.ResponseWriter) bool {
	if d.enter() {
		return true
	}
	w.Header().Set("Retry-After", "30")
	http.Error(w, fmt.Sprintf("%d pages are open, and there may be no more at a time", MaxVisitors), http.StatusServiceUnavailable)
	return false
}

// events sends the View of a Query, then its changes, as server-sent events. A slow visitor is sent the newest
// state when it is ready for it. A visitor that takes nothing is disconnected. Nothing waits for a visitor.
func (d *Dashboard) events(w http.ResponseWriter, r *http.Request) {
	if !d.admit(w) {
		return
	}
	defer d.leave()
	w.Header().Set("Content-Type", "text/event-stream")
	w.Header().Set("X-Accel-Buffering", "no") // of an Ingress
	out := stream{w, http.NewResponseController(w)}
	if out.send("retry: 2000\n: connected\n\n") != nil {
		return
	}
	query, end := ParseQuery(r.URL.Query()), time.After(streamLife)
	alive := time.NewTicker(beat)
	defer alive.Stop()
	var seen View
	var last *State
	for {
		changed := d.changed.Next()
		if s, past := d.current(); s != nil && s != last {
			last = s
			view := NewView(s, past, query)
			if sections, any := view.since(seen); any {
				if out.update(update{s.Time, sections}) != nil {
					return
				}
			}
			seen = view
		}
		select {
		case <-changed:
		case <-alive.C:
			if out.send(": \n\n") != nil {
				return
			}
		case <-r.Context().Done():
			return
		case <-end:
			out.send("event: again\ndata: again\n\n") //nolint:errcheck // the reader has gone
			return
		case <-d.stopped:
			return
		}
	}
}

// stream is a connection on which events are sent.
type stream struct {
	w http.ResponseWriter
	c *http.ResponseController
}

// send sends a text, or gives up.
func (s stream) send(text string) error {
	if err := s.c.SetWriteDeadline(time.Now().Add(writeTimeout)); err != nil {
		return err
	}
	defer s.c.SetWriteDeadline(time.Time{}) //nolint:errcheck // of the next request on the connection
	if _, err := s.w.Write([]byte(text)); err != nil {
		return err
	}
	return s.c.Flush()
}

func (s stream) update(u update) error {
	text, err := json.Marshal(u) // without line breaks
	if err != nil {
		return err
	}
	return s.send("event: change\ndata: " + string(text) + "\n\n")
}

// Challenge answers requests for the dashboard that have neither a token nor a client certificate: it asks for one
// of them. Without it, next would refuse an anonymous user and not name what is missing.
func Challenge(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		certified := r.TLS != nil && len(r.TLS.PeerCertificates) > 0
		if r.Header.Get("Authorization") == "" && !certified && strings.HasPrefix(r.URL.Path+"/", Path+"/") {
			w.Header().Set("WWW-Authenticate", "Bearer")
			http.Error(w, "the dashboard takes a token or a client certificate of somebody who may read "+Path+"; see: lodestone dashboard --help",
				http.StatusUnauthorized)
			return
		}
		next.ServeHTTP(w, r)
	})
}
