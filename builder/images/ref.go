package images

// Sole is the reference that means the only image of a layout or archive, whatever its name is.
const Sole = "sole.invalid/image:only"
