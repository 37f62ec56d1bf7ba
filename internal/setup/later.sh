# shellcheck shell=sh
# Sets later to what test.sh leaves to check.sh, as go test's -skip takes it: what takes other builds
# of everything (test.sh leaves out some of internal/barefork, too, by -short), what starts other
# languages' programs or a browser most of the time, what waits for ten seconds several times, and what
# does one thing over and over: kills at each step, plants each kind of file, tries each limit, makes
# hundreds of processes.
later='ServeSoak|HostileCells|Languages|PythonClients|NodeClient|Examples|Page|PagesOfOtherSites|Builds|Library|Install'
later="$later|Soak|R16Phases|R16Calls|R19Fakes|R19Silent|R19Relay|R19RelayStart|L01ExecPhases|ApplyKilled|SnapshotKilled|Races"
later="$later|StatePlanted|StatePlantedAbove|StateGarbageRecord|StateGarbageFiles|StateTruncated|StateDescriptors|DiskFull"
later="$later|Faults|MCPOutput|PackageManagers|Shells|RecordTruncated|P09NoTaskLeftAtKill|P09NoTaskOfUserLeft|R05ForkBomb"
later="$later|OutsideHoldsExec|OutsideHoldsRun|ReaderBlocked|ReaderOfMessagesBlocked"
later="$later|FewDescriptors|SmallLimits|P09NoTaskLeftAtStart|R06BigTeardown|ManyEntries|RecycledPIDs|ExecHandlesKept|ExecVeryShortTimeout|DeadlineAtTheEnd"
later="^Test($later)\$"
# Sets rare to what else tries more often the larger SBXRUN_SOAK is: test.sh has it with few tries, and
# check.sh once more with many.
rare='CurrentDirectoryExchanged|MountRace|ExecKilled|ExecSoak|L08KillMany|R09KillIsItsOwn|R25NeverReaped|VolumeKilled|CleanupWhileStarting'
rare="$rare|ExecDetachedRandom|ExecHandleKilled|L01ExecRandom|L06ExecWhileKilled|L14Random|L14Running|QuitCalls|R16Moments"
rare="$rare|R16Random|R16RandomIdmap|R16RandomJSON|R16RandomShort|R16RandomTerminal|R17StoppedEarly|R18Churn|StartClientKilled"
rare="$rare|StartClientKilledRandom|Together|UnprovenGoes|Slow|MCPKilled"
rare="^Test($rare)\$"
