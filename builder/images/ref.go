package images

// Sole is a reference to the only image of a layout or archive, whatever its name.
const Sole = "sole.invalid/image:only"
