// This file lets quit.go declare a function without a body.
