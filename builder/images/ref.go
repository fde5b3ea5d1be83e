package images

// Sole stands for the only image of a layout or archive, whatever its name is.
const Sole = "sole.invalid/image:only"
