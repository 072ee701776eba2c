module github.com/lodestone-lb/lodestone

go 1.26.0
