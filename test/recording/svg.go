package main

import (
	"bytes"
	"encoding/xml"
	"fmt"
	"regexp"
	"strings"
	"unicode/utf8"
)

// Size of the terminal in the picture. It is narrow, so that the picture is readable on a phone.
const (
	columns, rows = 68, 24
	fontSize      = 14.0
	charWidth     = 8.6 // of the widest font that is named in style
	lineHeight    = 19.0
	margin        = 14.0
	titleBar      = 26.0
)

// Limits of the pauses in the picture, in seconds. Within them, a pause follows the real duration.
const (
	shortest, longest = 0.12, 1.0
	typing            = 0.9 // pause after a command appears
)

// style is the style sheet. Lines appear one after the other. If the viewer prefers reduced motion,
// only the last screen is shown.
const style = `
text{font:%gpx ui-monospace,SFMono-Regular,Menlo,Consolas,"Liberation Mono","DejaVu Sans Mono",monospace;white-space:pre;fill:var(--fg)}
svg{--bg:#0d1117;--bar:#21262d;--fg:#d1d7e0;--dim:#9198a1;--strong:#f0f6fc;--good:#3fb950;--border:#3d444d}
@media(prefers-color-scheme:light){svg{--bg:#fff;--bar:#eff2f5;--fg:#1f2328;--dim:#59636e;--strong:#010409;--good:#116329;--border:#d1d9e0}}
.bg{fill:var(--bg);stroke:var(--border)}.bar{fill:var(--bar)}.dot{fill:var(--border)}
.d{fill:var(--dim)}.c{fill:var(--strong);font-weight:600}.g{fill:var(--good)}
@media(prefers-reduced-motion:no-preference){.l{animation:show .01s both}.s{animation:scroll %.2fs step-end both}}
@keyframes show{from{opacity:0}to{opacity:1}}
@keyframes scroll{%s}
`

// row is one line of the screen.
type row struct {
	at    float64 // time at which it appears
	class string
	text  string
}

// render draws events as an animated SVG without external files.
func render(events []event) []byte {
	all, end := layOut(events)
	hidden := max(0, len(all)-rows)
	var b bytes.Buffer
	width, height := columns*charWidth+2*margin, titleBar+rows*lineHeight+2*margin
	fmt.Fprintf(&b, `<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 %.0f %.0f" width="%.0f" height="%.0f" role="img" aria-labelledby="t">`+"\n", width, height, width, height)
	b.WriteString(`<title id="t">A terminal: edgebake builds an image and stamps a Site onto a copy; the machine boots, joins its cluster, and kubectl shows it Ready</title>` + "\n")
	fmt.Fprintf(&b, "<style>"+style+"</style>\n", fontSize, end, scrolling(all, end))
	fmt.Fprintf(&b, `<rect class="bg" x=".5" y=".5" width="%.0f" height="%.0f" rx="8"/>`+"\n", width-1, height-1)
	fmt.Fprintf(&b, `<path class="bar" d="M1 %.0fV8a7 7 0 0 1 7-7h%.0fa7 7 0 0 1 7 7v%.0fz"/>`+"\n", titleBar, width-16, titleBar-8)
	for i := range 3 {
		fmt.Fprintf(&b, `<circle class="dot" cx="%d" cy="13.5" r="4.5"/>`, 18+16*i)
	}
	fmt.Fprintf(&b, "\n"+`<svg x="0" y="%.0f" width="%.0f" height="%.0f"><g class="s" transform="translate(0 %.0f)" style="transform:translateY(%.0fpx)">`+"\n",
		titleBar+margin, width, rows*lineHeight, -float64(hidden)*lineHeight, -float64(hidden)*lineHeight)
	for i, r := range all {
		if r.text == "" {
			continue
		}
		fmt.Fprintf(&b, `<text class="l%s" x="%.0f" y="%.1f" style="animation-delay:%.2fs" xml:space="preserve">`, r.class, margin, float64(i)*lineHeight+fontSize, r.at)
		_ = xml.EscapeText(&b, []byte(r.text)) // cannot fail in memory
		b.WriteString("</text>\n")
	}
	b.WriteString("</g></svg>\n</svg>\n")
	return b.Bytes()
}

// isResult matches the machine's lines that have results. The picture omits its other lines.
var isResult = regexp.MustCompile(`: done in |: as it should be$| is Ready$`)

// layOut divides the events into rows, and returns the time at which the last row appears.
func layOut(events []event) (all []row, end float64) {
	at, last := 0.3, 0.0
	for i, e := range events {
		if e.Kind == console && !isResult.MatchString(e.Text) {
			continue
		}
		if i > 0 {
			at += min(max(e.Seconds-last, shortest), longest)
		}
		last = e.Seconds
		text, class := e.Text, ""
		switch {
		case e.Kind == command:
			text, class = "$ "+text, " c"
		case e.Kind == remark, e.Kind == console:
			class = " d"
		}
		if strings.Contains(text, "is Ready") || strings.Contains(text, " Ready ") {
			class = " g"
		}
		if i > 0 && (e.Kind == command || e.Kind == remark) {
			all = append(all, row{at: at})
		}
		for _, line := range wrap(text) {
			all = append(all, row{at, class, line})
		}
		if e.Kind == command {
			at += typing
		}
	}
	return all, at + 1
}

// wrap breaks a line at spaces, or at the terminal's width if the line has none.
func wrap(text string) []string {
	var out []string
	indent := ""
	if trimmed := strings.TrimLeft(text, " "); trimmed != text {
		indent = strings.Repeat(" ", len(text)-len(trimmed))
	}
	for utf8.RuneCountInString(text) > columns {
		cut := len(string([]rune(text)[:columns]))
		if at := strings.LastIndexByte(text[:cut], ' '); at > len(indent)+columns/3 {
			cut = at
		}
		out = append(out, strings.TrimRight(text[:cut], " "))
		text = indent + "  " + strings.TrimLeft(text[cut:], " ")
	}
	return append(out, text)
}

// scrolling returns the keyframes that keep the last row visible.
func scrolling(all []row, end float64) string {
	var b strings.Builder
	b.WriteString("0%{transform:translateY(0)}")
	for i := rows; i < len(all); i++ {
		if i+1 < len(all) && all[i+1].at == all[i].at {
			continue
		}
		fmt.Fprintf(&b, "%.2f%%{transform:translateY(%.0fpx)}", 100*all[i].at/end, -float64(i+1-rows)*lineHeight)
	}
	fmt.Fprintf(&b, "100%%{transform:translateY(%.0fpx)}", -float64(max(0, len(all)-rows))*lineHeight)
	return b.String()
}
