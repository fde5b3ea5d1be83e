package anatomy

import "slices"

// rect is a rectangle on the page, in the units of the drawing.
type rect struct{ X, Y, W, H float64 }

func (r rect) inset(by float64) rect {
	return rect{r.X + by, r.Y + by, max(0, r.W-2*by), max(0, r.H-2*by)}
}

// squarify divides a rectangle into parts of the given sizes, as square as possible, in rows along
// the shorter side. It begins a new row if another part would worsen the worst aspect ratio of the
// row (Bruls, Huizing and van Wijk, 2000). sizes must be in descending order.
func squarify(sizes []float64, in rect) []rect {
	out := make([]rect, 0, len(sizes))
	total := 0.0
	for _, s := range sizes {
		total += s
	}
	if total <= 0 || in.W <= 0 || in.H <= 0 {
		return make([]rect, len(sizes))
	}
	scale := in.W * in.H / total
	for rest := slices.Clone(sizes); len(rest) > 0; {
		side := min(in.W, in.H)
		n := 1
		for n < len(rest) && worst(rest[:n+1], side, scale) <= worst(rest[:n], side, scale) {
			n++
		}
		area := 0.0
		for _, s := range rest[:n] {
			area += s * scale
		}
		depth := 0.0
		if side > 0 {
			depth = area / side
		}
		at := 0.0
		for _, s := range rest[:n] {
			length := 0.0
			if depth > 0 {
				length = s * scale / depth
			}
			if in.W >= in.H {
				out = append(out, rect{in.X, in.Y + at, depth, length})
			} else {
				out = append(out, rect{in.X + at, in.Y, length, depth})
			}
			at += length
		}
		if in.W >= in.H {
			in.X, in.W = in.X+depth, max(0, in.W-depth)
		} else {
			in.Y, in.H = in.Y+depth, max(0, in.H-depth)
		}
		rest = rest[n:]
	}
	return out
}

// worst returns the worst aspect ratio in a row.
func worst(row []float64, side, scale float64) float64 {
	sum := 0.0
	for _, s := range row {
		sum += s * scale
	}
	biggest, smallest := row[0]*scale, row[len(row)-1]*scale
	if smallest <= 0 || side <= 0 || sum <= 0 {
		return 1e18
	}
	return max(side*side*biggest/(sum*sum), sum*sum/(side*side*smallest))
}
