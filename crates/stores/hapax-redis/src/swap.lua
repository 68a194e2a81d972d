-- Writes a cell if it bears the tag that is expected, or says what is there.
--
-- A script that fails half-way is not rolled back, so everything is checked first, and what is
-- written is one SET. What follows it cannot fail. Errors have codes of our own, because how a
-- server passes on what went wrong within a script differs by version:
--   HAPAX       the key holds what is no cell; nothing was written
--   NOTWRITTEN  a command was refused; nothing was written
--   READONLY    the same, by a replica
--
-- KEYS[1]  the cell; also the channel on which those who wait for it hear of its end
-- ARGV[1]  the tag to leave: 16 bytes
-- ARGV[2]  the tag to find, or nothing where there must be no cell
-- ARGV[3]  1 to issue a fence, 0 to keep the one that is there
-- ARGV[4]  the lease, in microseconds from now
-- ARGV[5]  for how long to keep it, in microseconds from now, or nothing: for ever
-- ARGV[6]  how long after that it may be removed, in microseconds
-- ARGV[7]  1 to tell those who wait
-- ARGV[8]  the sealed record
-- KEYS[2], ARGV[9]  both or neither: where the identity of the store is, and the one without which no
--                   new cell is made
--
-- Each answer begins with its kind and the tag it was asked with, so that one that went astray on
-- its way is found out.
--
-- A cell: 'hxc1', its tag, and four numbers of 16 digits (fence, end of the lease, end of the
-- keep, when it may be removed; nines for never), then the sealed record.
local MAGIC, HEAD = 'hxc1', 84
local NEVER = '9999999999999999'
-- Numbers are doubles, exact up to here: microseconds until the year 2255.
local LAST = 9007199254740991

local function digits(number)
  return string.format('%016.0f', math.min(number, LAST))
end

local function refused(answer)
  local code = 'NOTWRITTEN '
  if string.find(answer.err, 'WRONGTYPE', 1, true) then
    code = 'HAPAX '
  elseif string.find(answer.err, 'READONLY', 1, true) then
    code = 'READONLY '
  end
  return redis.error_reply(code .. answer.err)
end

local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]
local head = redis.pcall('GETRANGE', KEYS[1], 0, HEAD - 1)
if type(head) == 'table' then
  return refused(head)
end
local tag, fence = '', 0
if head ~= '' then
  local due = tonumber(string.sub(head, 69, 84))
  fence = tonumber(string.sub(head, 21, 36))
  if string.sub(head, 1, 4) ~= MAGIC or not due or not fence then
    return redis.error_reply('HAPAX the key holds something that is no cell')
  end
  -- Past this it may be gone at any time, so it is gone already: the server's own expiry is
  -- rounded, and lags.
  if now < due then
    tag = string.sub(head, 5, 20)
  end
end

if tag == ARGV[1] then
  return {'S', ARGV[1], digits(now), string.sub(head, 21, 36), string.sub(head, 37, 52)}
end
if tag ~= ARGV[2] then
  return {'C', ARGV[1], digits(now), tag ~= '' and redis.call('GET', KEYS[1])}
end

if ARGV[9] and tag == '' then
  local identity = redis.pcall('GET', KEYS[2])
  if type(identity) ~= 'string' or string.sub(identity, 1, 32) ~= ARGV[9] then
    return {'R', ARGV[1]}
  end
end

if ARGV[3] == '1' or tag == '' then
  fence = math.max(now, fence + 1)
end
fence = digits(fence)
local lease = digits(now + ARGV[4])
local keep, due = NEVER, NEVER
if ARGV[5] ~= '' then
  keep = digits(now + ARGV[5])
  due = digits(math.min(now + ARGV[5], LAST) + ARGV[6])
end
local cell = MAGIC .. ARGV[1] .. fence .. lease .. keep .. due .. ARGV[8]
local done
if due == NEVER then
  done = redis.pcall('SET', KEYS[1], cell)
else
  -- The first millisecond in which it may be removed, or a later one.
  local at = string.format('%.0f', math.floor(due / 1000) + 1)
  done = redis.pcall('SET', KEYS[1], cell, 'PXAT', at)
end
if done.err then
  return refused(done)
end
if ARGV[7] == '1' then
  -- A hint. Whoever may not publish, or reaches nobody, loses nothing.
  redis.pcall('PUBLISH', KEYS[1], '')
end
return {'S', ARGV[1], digits(now), fence, lease}
